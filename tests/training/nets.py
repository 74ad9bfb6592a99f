"""Small torch networks and their ONNX exports, with batches to train them."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from onnxtrain.torch.exporters import suppress_output


class Cnn(nn.Module):
    """Convolutions with BatchNorm, then Dropout; the mask may come from outside."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        # Without bias: BatchNorm takes it away, and Adam would blow its rounding errors up.
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6, momentum=0.2)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(6 * 4, 3)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 2)
        return torch.relu(self.norm2(self.conv2(x))).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.features(x)))


class Block(nn.Module):
    """Self-attention and a feed-forward part, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weight = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, -1)
        x = x + self.proj((weight @ v).transpose(1, 2).reshape(n, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Next-token scores [batch, time, vocabulary]."""

    def __init__(self, vocabulary: int = 11, width: int = 16, time: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(time, width) * 0.1)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Net:
    """A module with its ONNX form and a source of batches."""

    make: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    axis: int = 1


def _classes(shape: tuple[int, ...]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((n, *shape)).astype(np.float32)
        return x, (x.reshape(n, -1)[:, :3].argmax(1)).astype(np.int64)

    return draw


def _tokens(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.integers(0, 11, (n, 6))
    return ids, (ids * 3 + 1) % 11


NETS = {
    "mlp": Net(mlp, _classes((6,))),
    "cnn": Net(Cnn, _classes((1, 8, 8))),
    "transformer": Net(Transformer, _tokens, axis=-1),
}


def module(name: str) -> nn.Module:
    """A freshly initialised module; the same one at every call."""
    torch.manual_seed(0)
    return NETS[name].make()


def batches(name: str, count: int, size: int = 8, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(seed)
    return [NETS[name].batch(rng, size) for _ in range(count)]


@functools.cache
def exported(name: str, training: bool = False) -> onnx.ModelProto:
    """The module as ONNX: input x, output y, batch dynamic."""
    net = module(name).train(training)
    (x, _), mode = batches(name, 1)[0], torch.onnx.TrainingMode
    buffer = io.BytesIO()
    with suppress_output():
        torch.onnx.export(
            net,
            (torch.from_numpy(x),),
            buffer,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            training=mode.TRAINING if training else mode.EVAL,
            do_constant_folding=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    fresh = module(name).state_dict()
    for tensor in model.graph.initializer:
        if "running_" in tensor.name:  # tracing in training mode has moved them
            tensor.raw_data = fresh[tensor.name].numpy().tobytes()
    return model
