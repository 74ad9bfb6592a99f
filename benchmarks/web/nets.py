"""Write the inputs of every browser engine: models, initial weights, batches, reference losses.

Run as ``python nets.py OUT``. For each model ``OUT/<model>/`` gets ``model.onnx`` (opset 17, which
the old official build reads too), ``weights.bin`` and ``batches.bin`` with ``task.json`` as
their index, and ``<optimizer>/``, our artifacts. The losses are torch's, for every variant of the
optimizer: a fast wrong answer does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch.nn import functional as F

from onnxtrain import build
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim import SGD, AdamW

BATCH, COUNT, CLASSES = 64, 16, 10
RATES = {"adamw": 1e-3, "sgd": 0.05}
Weights = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


class Net:
    """A forward model under construction, and its weights."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(1)
        self.weights: Weights = {}
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 17}, name="net"))
        self.x = self.op.input("x", ir.DataType.FLOAT, ["batch", *shape])

    def weight(self, name: str, *shape: int, fan_in: int) -> ir.Value:
        """Return a weight drawn as torch draws it."""
        bound = 1 / np.sqrt(fan_in)
        return self._stored(name, self.rng.uniform(-bound, bound, shape))

    def filled(self, name: str, value: float, size: int) -> ir.Value:
        """Return a weight filled with one value."""
        return self._stored(name, np.full(size, value))

    def _stored(self, name: str, array: np.ndarray) -> ir.Value:
        array = self.weights[name] = array.astype(np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(array, name=name),
        )
        self.op.graph.register_initializer(value)
        return value

    def gemm(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Add a layer for rows."""
        w = self.weight(f"{name}.weight", wanted, given, fan_in=given)
        return self.op.Gemm(x, w, self.weight(f"{name}.bias", wanted, fan_in=given), transB=1)

    def dense(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Add a layer for the last axis."""
        w = self.weight(f"{name}.weight", given, wanted, fan_in=given)
        return self.op.Add(self.op.MatMul(x, w), self.filled(f"{name}.bias", 0, wanted))

    def finished(self, logits: ir.Value) -> onnx.ModelProto:
        """Return the model."""
        logits.name = "logits"
        self.op.graph.outputs.append(logits)
        model = ir.to_proto(ir.Model(self.op.graph, ir_version=8))
        onnx.checker.check_model(model, full_check=True)
        return model


def mlp() -> tuple[Net, onnx.ModelProto]:
    """784-128-10."""
    net = Net(784)
    h = net.op.Relu(net.gemm("fc1", net.x, 784, 128))
    return net, net.finished(net.gemm("fc2", h, 128, CLASSES))


def cnn() -> tuple[Net, onnx.ModelProto]:
    """Two convolutions, max-pool, two layers."""
    net = Net(1, 28, 28)
    op = net.op

    def conv(name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        w = net.weight(f"{name}.weight", wanted, given, 3, 3, fan_in=9 * given)
        b = net.weight(f"{name}.bias", wanted, fan_in=9 * given)
        return op.Relu(op.Conv(x, w, b, kernel_shape=[3, 3]))

    h = conv("conv2", conv("conv1", net.x, 1, 32), 32, 64)
    h = op.Flatten(op.MaxPool(h, kernel_shape=[2, 2], strides=[2, 2]))
    h = op.Relu(net.gemm("fc1", h, 9216, 128))
    return net, net.finished(net.gemm("fc2", h, 128, CLASSES))


def transformer() -> tuple[Net, onnx.ModelProto]:
    """Two blocks of self-attention over the rows of the image."""
    net, width, heads, tokens = Net(28, 28), 32, 4, 28
    op = net.op

    def norm(name: str, x: ir.Value) -> ir.Value:
        scale, shift = net.filled(f"{name}.weight", 1, width), net.filled(f"{name}.bias", 0, width)
        return op.LayerNormalization(x, scale, shift, axis=-1, epsilon=1e-5)

    def split(x: ir.Value, perm: list[int]) -> ir.Value:
        shape = op.const([0, tokens, heads, width // heads])
        return op.Transpose(op.Reshape(x, shape), perm=perm)

    h = net.dense("embed", net.x, 28, width)
    h = op.Add(h, net.weight("position", tokens, width, fan_in=width))
    for i in range(2):
        y = norm(f"block{i}.norm1", h)
        q = split(net.dense(f"block{i}.q", y, width, width), [0, 2, 1, 3])
        k = split(net.dense(f"block{i}.k", y, width, width), [0, 2, 3, 1])
        v = split(net.dense(f"block{i}.v", y, width, width), [0, 2, 1, 3])
        scores = op.Softmax(op.Mul(op.MatMul(q, k), (width / heads) ** -0.5), axis=-1)
        mixed = op.Transpose(op.MatMul(scores, v), perm=[0, 2, 1, 3])
        mixed = op.Reshape(mixed, op.const([0, tokens, width]))
        h = op.Add(h, net.dense(f"block{i}.out", mixed, width, width))
        inner = op.Relu(net.dense(f"block{i}.up", norm(f"block{i}.norm2", h), width, 64))
        h = op.Add(h, net.dense(f"block{i}.down", inner, 64, width))
    h = op.ReduceMean(norm("norm", h), axes=[1], keepdims=0)
    return net, net.finished(net.gemm("head", h, width, CLASSES))


def torch_mlp(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    return F.linear(F.relu(F.linear(x, w["fc1.weight"], w["fc1.bias"])), *_of(w, "fc2"))


def torch_cnn(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    h = F.relu(F.conv2d(F.relu(F.conv2d(x, *_of(w, "conv1"))), *_of(w, "conv2")))
    return F.linear(F.relu(F.linear(F.max_pool2d(h, 2).flatten(1), *_of(w, "fc1"))), *_of(w, "fc2"))


def torch_transformer(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The same in torch."""

    def dense(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, [32], *_of(w, name))

    h = dense("embed", x) + w["position"]
    for i in range(2):
        y = norm(f"block{i}.norm1", h)
        q, k, v = (dense(f"block{i}.{n}", y).reshape(-1, 28, 4, 8).transpose(1, 2) for n in "qkv")
        mixed = (q @ k.transpose(2, 3) * 8**-0.5).softmax(-1) @ v
        h = h + dense(f"block{i}.out", mixed.transpose(1, 2).reshape(-1, 28, 32))
        h = h + dense(f"block{i}.down", dense(f"block{i}.up", norm(f"block{i}.norm2", h)).relu())
    return F.linear(norm("norm", h).mean(1), *_of(w, "head"))


def _of(w: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return w[f"{name}.weight"], w[f"{name}.bias"]


MODELS: dict[str, tuple[Callable[[], tuple[Net, onnx.ModelProto]], Callable[..., Any]]] = {
    "mlp": (mlp, torch_mlp),
    "cnn": (cnn, torch_cnn),
    "transformer": (transformer, torch_transformer),
}


def batches(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return images around 0, a pattern per class and noise, and their classes.

    Around 0, so that hidden units stay alive: moments of dead ones become denormal numbers, and
    those would be timed then.
    """
    rng = np.random.default_rng(7)
    patterns = rng.uniform(-1, 1, (CLASSES, *shape))
    labels = rng.integers(0, CLASSES, (COUNT, BATCH))
    x = 0.4 * patterns[labels] + 0.6 * rng.uniform(-1, 1, (COUNT, BATCH, *shape))
    return x.astype(np.float32), labels.astype(np.int32)


def true_losses(
    forward: Callable[..., Any], weights: Weights, x: np.ndarray, y: np.ndarray, kind: str
) -> list[float]:
    """Return the losses of the first steps, one per batch.

    ``adam`` is AdamW without decay, as TensorFlow.js has it; ``official`` is what the old training
    build computes: no decay, eps 1e-6 added before the bias correction.
    """
    w = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in w.items()}
    losses = []
    for t, (rows, labels) in enumerate(zip(x, y, strict=True), 1):
        loss = F.cross_entropy(forward(w, torch.tensor(rows)), torch.tensor(labels).long())
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(w.values()))
        with torch.no_grad():
            for (n, p), g in zip(w.items(), gradients, strict=True):
                if kind == "sgd":
                    p -= RATES["sgd"] * g
                    continue
                rate, (m, v) = RATES["adamw"], moments[n]
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                low, high = 1 - 0.9**t, (1 - 0.999**t) ** 0.5
                if kind == "adamw":
                    p *= 1 - rate * 0.01
                if kind == "official":
                    p -= rate * high / low * m / (v.sqrt() + 1e-6)
                else:
                    p -= rate / low * m / (v.sqrt() / high + 1e-8)
    return losses


def write(out: Path, name: str) -> None:
    """Write one folder."""
    make, forward = MODELS[name]
    net, model = make()
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    places, offset = [], 0
    for n, a in net.weights.items():
        places.append({"name": n, "shape": a.shape, "offset": offset})
        offset += a.size
    (folder / "weights.bin").write_bytes(b"".join(a.tobytes() for a in net.weights.values()))
    x, y = batches(net.shape)
    (folder / "batches.bin").write_bytes(x.tobytes() + y.tobytes())
    torch.set_num_threads(1)
    losses = {
        k: true_losses(forward, net.weights, x, y, k) for k in ("adamw", "adam", "official", "sgd")
    }
    task = {"weights": places, "shape": net.shape, "batch": BATCH, "count": COUNT, "losses": losses}
    (folder / "task.json").write_text(json.dumps({**task, "rates": RATES}))
    for kind, optimizer in (
        ("adamw", AdamW(lr=RATES["adamw"])),
        ("sgd", SGD(lr=RATES["sgd"])),
    ):
        built = build(
            model,
            loss="cross_entropy",
            optimizer=optimizer,
            train=list(net.weights),
            target="web",
            steps_per_call=8,
        )
        built.save(folder / kind)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MODELS:
        write(Path(sys.argv[1]), chosen)
