"""Gradients of gradients: an MLP, a CNN and an attention block against torch's double backward."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onnxtrain

from .export import export
from .models import ZooModel
from .models.base import Draw, normal


class SmoothMlp(nn.Module):
    """Two hidden layers and a squared output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


class SmallCnn(nn.Module):
    """Convolutions with a stride, a group, a max pool and an average pool; a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.softplus(self.first(image)), 2)
        x = torch.tanh(self.second(x)).mean(dim=(2, 3))
        return -F.log_softmax(self.head(x), dim=-1)[:, 0].mean()


class AttentionBlock(nn.Module):
    """LayerNorm, two-head self-attention, a GELU MLP, squared mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        share = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // 2), dim=-1)
        x = x + self.out((share @ v).transpose(1, 2).reshape(n, t, width))
        return (x + self.down(F.gelu(self.up(x)))).pow(2).mean()


def _entry(factory, draw: Draw) -> ZooModel:
    return ZooModel(f"second_order_{factory.__name__}", factory, (draw,))


ENTRIES = [
    _entry(SmoothMlp, normal(5)),
    _entry(SmallCnn, normal(2, 10, 10)),
    _entry(AttentionBlock, normal(4, 8)),
]


def _run(model: onnx.ModelProto, values: list[np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [slot.name for slot in model.graph.input]
    return session.run(None, dict(zip(names, values, strict=True)))


def _torch_hessian_product(entry: ZooModel, batch: int, directions: dict[str, np.ndarray]):
    """Torch float64: loss, gradients, and the gradients of <gradients, directions>."""
    module = entry.build().double()
    named = dict(module.named_parameters())
    loss = module(*(x.double() for x in entry.inputs(batch)))
    first = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    contracted = sum(
        (g * torch.from_numpy(directions[name]).double()).sum()
        for name, g in zip(named, first, strict=True)
    )
    second = torch.autograd.grad(contracted, list(named.values()), allow_unused=True)
    return (
        [g.detach().numpy() for g in first],
        [
            np.zeros(p.shape) if g is None else g.numpy()
            for g, p in zip(second, named.values(), strict=True)
        ],
    )


def _assert_close(actual, expected, names) -> None:
    largest = max(np.linalg.norm(g) for g in expected)
    for name, g, wanted in zip(names, actual, expected, strict=True):
        assert g.shape == wanted.shape, name
        bound = 1e-4 * max(np.linalg.norm(wanted), 1e-2 * largest)
        assert np.linalg.norm(g - wanted) <= bound, name


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.factory.__name__)
@pytest.mark.parametrize("batch", [4, 3])
def test_vjp_of_grad_is_the_hessian_product(entry: ZooModel, batch: int):
    """Contract the gradient outputs with directions; their gradient is a row of the Hessian."""
    exported = export(entry)
    names = list(exported.names)
    wrt = list(exported.names.values())
    parameters = onnxtrain.parameters(exported.model, wrt)
    first = onnxtrain.grad(exported.model, wrt)
    gradients = [value.name for value in first.graph.output][-len(wrt) :]
    second = onnxtrain.vjp(first, wrt, gradients)

    generator = np.random.default_rng(entry.seed)
    directions = {
        name: generator.standard_normal(parameters[exported.names[name]].shape).astype(np.float32)
        for name in names
    }
    inputs = [x.numpy() for x in entry.inputs(batch)]
    outputs = _run(second, [*inputs, *parameters.values(), *directions.values()])
    wanted_first, wanted_second = _torch_hessian_product(entry, batch, directions)
    _assert_close(outputs[-2 * len(wrt) : -len(wrt)], wanted_first, names)
    _assert_close(outputs[-len(wrt) :], wanted_second, names)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.factory.__name__)
def test_vjp_of_vjp_gives_the_gradient_back_for_its_cotangent(entry: ZooModel):
    """``vjp`` is linear in the cotangent: its derivative by it is <gradient, direction>."""
    exported = export(entry)
    wrt = list(exported.names.values())
    parameters = onnxtrain.parameters(exported.model, wrt)
    first = onnxtrain.vjp(exported.model, wrt)
    cotangent = first.graph.input[-1].name
    gradients = [value.name for value in first.graph.output][-len(wrt) :]
    second = onnxtrain.vjp(first, [cotangent], gradients)

    inputs = [x.numpy() for x in entry.inputs(4)]
    one = np.ones((), dtype=np.float32)
    computed = _run(first, [*inputs, *parameters.values(), one])[-len(wrt) :]
    directions = [np.cos(np.arange(g.size, dtype=np.float32)).reshape(g.shape) for g in computed]
    total = _run(second, [*inputs, *parameters.values(), one, *directions])[-1]
    wanted = sum(float((g * d).sum()) for g, d in zip(computed, directions, strict=True))
    assert total == pytest.approx(wanted, rel=1e-4, abs=1e-5)
