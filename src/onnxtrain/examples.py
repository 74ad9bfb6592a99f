"""A small model and a dataset, so that examples run without downloads."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save

# 5 x 7 bitmaps of the digits 0 to 9, one 5-bit integer per row.
_GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (14, 17, 1, 6, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


def digits_model(
    path: str | os.PathLike[str] | None = None,
    *,
    hidden: int = 32,
    dropout: float = 0.0,
    seed: int = 0,
) -> onnx.ModelProto:
    """Return an untrained classifier of 8 x 8 images: image [batch, 64] to logits [batch, 10].

    Args:
        path: file to write the model to, if given.
        hidden: features of the hidden layer.
        dropout: probability that training drops a hidden feature; inference drops none.
        seed: random seed of the weights.

    >>> [v.name for v in digits_model().graph.initializer]
    ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']
    """
    if hidden < 1:
        raise OnnxTrainError(f"hidden must be at least 1: {hidden}")
    rng = np.random.default_rng(seed)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="digits")
    op = OpBuilder(graph)
    image = op.input("image", ir.DataType.FLOAT, ["batch", 64])

    def weight(name: str, *shape: int) -> ir.Value:
        scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
        tensor = ir.Tensor((scale * rng.standard_normal(shape)).astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        graph.register_initializer(value)
        return value

    h = op.Relu(op.Gemm(image, weight("fc1.weight", 64, hidden), weight("fc1.bias", hidden)))
    if dropout:
        h = op.Dropout(h, op.const(dropout, ir.DataType.FLOAT))
    logits = op.Gemm(h, weight("fc2.weight", hidden, 10), weight("fc2.bias", 10))
    logits.name = "logits"
    graph.outputs.append(logits)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    if path is not None:
        save(model, path)
    return model


def digits_data(samples: int = 1200, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return 8 x 8 images of digits: ``image`` float32 [samples, 64] and ``labels`` int64.

    Each is a digit of a bitmap font, with random position, brightness and noise.

    >>> data = digits_data(3)
    >>> data["image"].shape, data["labels"].dtype.name
    ((3, 64), 'int64')
    """
    if samples < 1:
        raise OnnxTrainError(f"samples must be at least 1: {samples}")
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, samples)
    rows, columns = rng.integers(0, 2, samples), rng.integers(0, 4, samples)
    bits = np.array(_GLYPHS)[:, :, None] >> np.arange(4, -1, -1) & 1
    image = np.zeros((samples, 8, 8), np.float32)
    for pixels, label, row, column in zip(image, labels, rows, columns, strict=True):
        pixels[row : row + 7, column : column + 5] = bits[label]
    image *= rng.uniform(0.6, 1.0, (samples, 1, 1))
    image += rng.normal(0.0, 0.15, image.shape)
    return {"image": image.clip(0, 1).reshape(samples, 64), "labels": labels}


__all__ = ["digits_data", "digits_model"]
