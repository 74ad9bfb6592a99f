"""An encoder of MiniLM's shape with a classifier, random weights, and texts of three classes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

WORDS, WIDTH, INNER, LAYERS, HEADS, LENGTH, CLASSES = 30522, 384, 1536, 6, 12, 16, 3
_TOPIC = 400  # words that one kind of text prefers


class _Net:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="encoder"))

    def weight(self, name: str, *shape: int, scale: float = 0.02, start: float = 0.0) -> ir.Value:
        array = (start + scale * self.rng.standard_normal(shape)).astype(np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(shape),
            const_value=ir.Tensor(array, name=name),
        )
        self.op.graph.register_initializer(value)
        return value

    def linear(self, path: str, x: ir.Value, inputs: int, outputs: int) -> ir.Value:
        weight = self.weight(f"{path}.weight", inputs, outputs, scale=inputs**-0.5)
        return self.op.Add(self.op.MatMul(x, weight), self.weight(f"{path}.bias", outputs))

    def norm(self, path: str, x: ir.Value) -> ir.Value:
        scale = self.weight(f"{path}.weight", WIDTH, scale=0.0, start=1.0)
        return self.op.LayerNormalization(x, scale, self.weight(f"{path}.bias", WIDTH), axis=-1)

    def layer(self, path: str, x: ir.Value) -> ir.Value:
        op = self.op

        def heads(name: str, perm: list[int]) -> ir.Value:
            y = self.linear(f"{path}.{name}", x, WIDTH, WIDTH)
            return op.Transpose(op.Reshape(y, op.const([0, 0, HEADS, WIDTH // HEADS])), perm=perm)

        q, k, v = (
            heads(n, p)
            for n, p in (
                ("query", [0, 2, 1, 3]),
                ("key", [0, 2, 3, 1]),
                ("value", [0, 2, 1, 3]),
            )
        )
        scores = op.Mul(op.MatMul(q, k), op.const(np.float32((WIDTH / HEADS) ** -0.5)))
        mixed = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
        mixed = op.Reshape(mixed, op.const([0, 0, WIDTH]))
        y = self.linear(f"{path}.mixed", mixed, WIDTH, WIDTH)
        x = self.norm(f"{path}.first", op.Add(x, y))
        inner = op.Gelu(self.linear(f"{path}.inner", x, WIDTH, INNER))
        y = self.linear(f"{path}.outer", inner, INNER, WIDTH)
        return self.norm(f"{path}.second", op.Add(x, y))


def minilm() -> ir.Model:
    """Return the encoder: words and places, layers, the mean of all positions, a classifier."""
    net = _Net()
    op = net.op
    ids = op.input("input_ids", ir.DataType.INT64, ["batch", LENGTH])
    x = op.Gather(net.weight("words.weight", WORDS, WIDTH, scale=1.0), ids, axis=0)
    x = op.Add(x, net.weight("places.weight", LENGTH, WIDTH, scale=0.3))
    for i in range(LAYERS):
        x = net.layer(f"layers.{i}", x)
    mean = op.ReduceMean(x, op.const([1]), keepdims=0)
    scores = net.linear("classifier", mean, WIDTH, CLASSES)
    scores.name = "logits"
    op.graph.outputs.append(scores)
    return ir.Model(op.graph, ir_version=10)


def examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts and their classes: half of the words are those of the class."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), count)
    ids = rng.integers(CLASSES * _TOPIC, WORDS, (len(labels), LENGTH))
    own = labels[:, None] * _TOPIC + rng.integers(0, _TOPIC, ids.shape) // 16
    ids = np.where(rng.random(ids.shape) < 0.5, own, ids)
    order = rng.permutation(len(labels))
    return ids[order], labels[order]
