"""Writes what the demo page trains: models for each device, and scikit-learn's digits as bytes.

Run as ``python make_artifacts.py OUT``; gives ``OUT/art/<model>-<target>/`` and ``OUT/data/``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.datasets import load_digits

from onnxtrain.artifacts import build
from onnxtrain.graph.builder import OpBuilder

TEST = 360


class Net:
    """A model under construction: image [batch, 1, 8, 8] -> logits [batch, 10]."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="digits"))
        self.image = self.op.input("image", ir.DataType.FLOAT, ["batch", 1, 8, 8])

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Give an initializer."""
        array = array.astype(np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(array, name=name),
        )
        self.op.graph.register_initializer(value)
        return value

    def weight(self, name: str, *shape: int, fan_in: int) -> ir.Value:
        """Give an initializer drawn as torch draws it."""
        bound = 1 / np.sqrt(fan_in)
        return self.constant(name, self.rng.uniform(-bound, bound, shape))

    def linear(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Give a fully connected layer."""
        return self.op.Gemm(
            x,
            self.weight(f"{name}.weight", wanted, given, fan_in=given),
            self.weight(f"{name}.bias", wanted, fan_in=given),
            transB=1,
        )

    def conv(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Give a 3x3 convolution that keeps the size."""
        w = self.weight(f"{name}.weight", wanted, given, 3, 3, fan_in=9 * given)
        b = self.weight(f"{name}.bias", wanted, fan_in=9 * given)
        return self.op.Conv(x, w, b, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def finished(self, logits: ir.Value) -> onnx.ModelProto:
        """Give the model."""
        logits.name = "logits"
        self.op.graph.outputs.append(logits)
        return ir.to_proto(ir.Model(self.op.graph, ir_version=10))


def mlp() -> onnx.ModelProto:
    """Give two layers."""
    net = Net()
    h = net.op.Relu(net.linear("fc1", net.op.Flatten(net.image), 64, 64))
    return net.finished(net.linear("fc2", h, 64, 10))


def cnn() -> onnx.ModelProto:
    """Give a convolution, BatchNormalization, max-pool, Dropout and a layer."""
    net = Net()
    op = net.op
    ones, zeros = np.ones(12), np.zeros(12)
    norm = [
        net.constant(f"norm.{n}", a)
        for n, a in (("weight", ones), ("bias", zeros), ("mean", zeros), ("var", ones))
    ]
    h = op.Relu(op.BatchNormalization(net.conv("conv1", net.image, 1, 12), *norm))
    h = op.MaxPool(h, kernel_shape=[2, 2], strides=[2, 2])
    h = op.Dropout(op.Flatten(h), net.constant("dropout.ratio", np.array(0.2)))
    return net.finished(net.linear("head", h, 192, 10))


def main(out: Path) -> None:
    """Write everything."""
    for name, model in (("mlp", mlp()), ("cnn", cnn())):
        for target in ("wasm", "webgpu"):
            built = build(
                model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"], target=target
            )
            built.save(out / "art" / f"{name}-{target}")
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "digits.bin").write_bytes(digits.images[order].astype(np.uint8).tobytes())
    (data / "labels.bin").write_bytes(digits.target[order].astype(np.uint8).tobytes())
    (data / "digits.json").write_text(json.dumps({"count": len(order), "test": TEST, "top": 16}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
