"""The character model of the page Write: ids [batch, 64] -> logits [batch, 64, 128].

A causal convolution, then transformer blocks: about 300,000 parameters, small enough that words
appear after a minute of training on wasm. The page assigns ids to characters.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

LENGTH = 64
CHARACTERS = 128
WIDTH = 96
HEADS = 4
BLOCKS = 2
REACH = 5
"""Kernel size of the causal convolution, which learns local patterns quickly."""


class Writer:
    """A model under construction."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="writer"))

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Return an initializer."""
        tensor = ir.Tensor(np.asarray(array, np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        self.op.graph.register_initializer(value)
        return value

    def weight(self, name: str, *shape: int, scale: float) -> ir.Value:
        """Return a random initializer."""
        return self.constant(name, scale * self.rng.standard_normal(shape))

    def dense(self, name: str, x: ir.Value, given: int, wanted: int, gain: float = 1) -> ir.Value:
        """Return a fully connected layer."""
        w = self.weight(f"{name}.weight", given, wanted, scale=gain / np.sqrt(given))
        return self.op.Add(self.op.MatMul(x, w), self.constant(f"{name}.bias", np.zeros(wanted)))

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        """Return a LayerNormalization."""
        scale = self.constant(f"{name}.weight", np.ones(WIDTH))
        return self.op.LayerNormalization(x, scale, self.constant(f"{name}.bias", np.zeros(WIDTH)))

    def recent(self, x: ir.Value) -> ir.Value:
        """Return a causal convolution over the last characters."""
        op = self.op
        columns = op.Transpose(x, perm=[0, 2, 1])
        w = self.weight("recent.weight", WIDTH, WIDTH, REACH, scale=1 / np.sqrt(WIDTH * REACH))
        h = op.Conv(columns, w, kernel_shape=[REACH], pads=[REACH - 1, 0])
        return op.Add(x, op.Transpose(op.Relu(h), perm=[0, 2, 1]))

    def attention(self, name: str, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Return causal self-attention."""
        op, each = self.op, WIDTH // HEADS

        def heads(part: str, perm: list[int]) -> ir.Value:
            h = self.dense(f"{name}.{part}", x, WIDTH, WIDTH)
            return op.Transpose(op.Reshape(h, op.const([0, LENGTH, HEADS, each])), perm=perm)

        q, k, v = heads("q", [0, 2, 1, 3]), heads("k", [0, 2, 3, 1]), heads("v", [0, 2, 1, 3])
        scores = op.Softmax(op.Add(op.Mul(op.MatMul(q, k), each**-0.5), mask), axis=-1)
        mixed = op.Transpose(op.MatMul(scores, v), perm=[0, 2, 1, 3])
        joined = op.Reshape(mixed, op.const([0, LENGTH, WIDTH]))
        return self.dense(f"{name}.out", joined, WIDTH, WIDTH, gain=0.5)


def writer() -> onnx.ModelProto:
    """Return the model."""
    net = Writer()
    op = net.op
    ids = op.input("ids", ir.DataType.INT64, ["batch", LENGTH])
    mask = net.constant("mask", np.triu(np.full((LENGTH, LENGTH), -1e4), 1))
    h = op.Gather(net.weight("embed.weight", CHARACTERS, WIDTH, scale=0.5), ids)
    h = op.Add(h, net.weight("position", LENGTH, WIDTH, scale=0.05))
    h = net.recent(h)
    for i in range(BLOCKS):
        h = op.Add(h, net.attention(f"block{i}", net.norm(f"block{i}.norm1", h), mask))
        y = op.Relu(net.dense(f"block{i}.up", net.norm(f"block{i}.norm2", h), WIDTH, 3 * WIDTH))
        h = op.Add(h, net.dense(f"block{i}.down", y, 3 * WIDTH, WIDTH, gain=0.5))
    logits = net.dense("head", net.norm("norm", h), WIDTH, CHARACTERS, gain=0.3)
    logits.name = "logits"
    op.graph.outputs.append(logits)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))
