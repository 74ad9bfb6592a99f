"""Small modules that stress one thing each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(x.mean((2, 3)))


class Several(nn.Module):
    """A dict with tensors, a tuple, an integer tensor and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> dict:
        y = self.fc(x) * scale
        if shift is not None:
            y = y + shift
        return {"logits": y, "parts": (y.exp(), y.sum(1)), "best": y.argmax(1), "note": "kept"}


class Residual(nn.Module):
    """Gives its input back, and one output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + torch.sigmoid(self.fc(x))
        return y, y, x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class Partly(nn.Module):
    """One parameter that nothing reads, one buffer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.offset


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(3, 4, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.gelu(self.mix(left, right))


class Functional(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s) * 0.5) for s in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


@dataclasses.dataclass(frozen=True)
class Case:
    """A module with the shapes of its inputs; ``quick`` ones run by default."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    quick: bool = False
    integers: int = 0
    train: bool = True
    kwargs: dict = dataclasses.field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().train(self.train)

    def inputs(self, rows: int = 3, seed: int = 0) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        if self.integers:
            return [torch.randint(0, self.integers, (rows, *s), generator=g) for s in self.shapes]
        return [torch.randn((rows, *s), generator=g).requires_grad_() for s in self.shapes]


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, ((6,),), quick=True),
    "cnn-train": Case(Cnn, ((2, 6, 6),), quick=True),
    "cnn-eval": Case(Cnn, ((2, 6, 6),), train=False),
    "several": Case(Several, ((6,),), quick=True, kwargs={"scale": 2.0}),
    "residual": Case(Residual, ((4,),), quick=True),
    "attention": Case(Attention, ((5, 8),), quick=True),
    "lstm": Case(lambda: Recurrent(nn.LSTM), ((4, 4),)),
    "gru": Case(lambda: Recurrent(nn.GRU), ((4, 4),)),
    "rnn": Case(lambda: Recurrent(nn.RNN), ((4, 4),)),
    "tied": Case(Tied, ((5,),), quick=True, integers=7),
    "partly": Case(Partly, ((4,),), quick=True),
    "two-inputs": Case(TwoInputs, ((3,), (4,)), quick=True),
    "conv1d": Case(lambda: _layers(nn.Conv1d(3, 4, 3, stride=2), nn.ELU()), ((3, 9),)),
    "conv3d": Case(lambda: _layers(nn.Conv3d(1, 2, 2), nn.AvgPool3d(2)), ((1, 5, 5, 5),)),
    "depthwise": Case(lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), ((4, 5, 5),)),
    "transposed": Case(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), ((2, 4, 4),)),
    "batch-norm-1d": Case(lambda: _layers(nn.Linear(4, 5), nn.BatchNorm1d(5)), ((4,),)),
    "layer-norm": Case(lambda: _layers(nn.LayerNorm(6), nn.Linear(6, 2)), ((6,),)),
    "group-norm": Case(lambda: nn.GroupNorm(2, 4), ((4, 3, 3),)),
    "instance-norm": Case(lambda: nn.InstanceNorm2d(3, affine=True), ((3, 4, 4),)),
    "prelu": Case(lambda: _layers(nn.Linear(4, 4), nn.PReLU(4)), ((4,),)),
    "glu": Case(lambda: _layers(nn.Linear(4, 6), nn.GLU()), ((4,),)),
    "activations": Case(
        lambda: _layers(nn.Softplus(), nn.Linear(4, 4), nn.SiLU(), nn.Mish(), nn.Hardswish()),
        ((4,),),
    ),
    "embedding-sum": Case(
        lambda: _layers(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)), ((3,),), integers=9
    ),
    "upsample": Case(
        lambda: _layers(nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2)), ((1, 3, 3),)
    ),
    "pad-reflect": Case(lambda: _layers(nn.ReflectionPad2d(1), nn.Conv2d(1, 2, 3)), ((1, 4, 4),)),
    "einsum": Case(
        lambda: Functional(lambda x, w: torch.einsum("bij,jk->bik", x, w), (4, 3)), ((2, 4),)
    ),
    "softmax": Case(lambda: Functional(lambda x, w: torch.log_softmax(x @ w, -1), (4, 3)), ((4,),)),
    "gather": Case(
        lambda: Functional(lambda x, w: (x * w).flip(1).cumsum(1)[:, 1::2], (6,)), ((6,),)
    ),
    "no-parameters": Case(lambda: _layers(nn.Tanh(), nn.AdaptiveAvgPool2d(2)), ((2, 4, 4),)),
}
