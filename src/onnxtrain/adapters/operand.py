"""Weights as products read them: stored tensors, or what a few operators make of stored tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op

_SAME_SHAPE = ("DequantizeLinear", "Cast", "Identity")


@dataclasses.dataclass(frozen=True)
class Operand:
    """A frozen tensor: the value that a product reads, its size, and the tensors it comes from."""

    value: ir.Value
    shape: tuple[int, ...]
    stored: tuple[ir.Value, ...]
    """Initializers, in order; more than one if they are joined."""
    joined: tuple[tuple[ir.Value, int], ...] = ()
    """The initializers that lie side by side along the output axis, each with its width."""


def operand(value: ir.Value | None, outputs_axis: int = 1) -> Operand | None:
    """Return the weight behind a value; ``None`` if it is computed from anything but weights.

    Args:
        value: what a product reads.
        outputs_axis: which of its axes counts the outputs of the layer.
    """
    if value is None:
        return None
    tensor = value.const_value
    if tensor is not None and value.is_initializer():
        return Operand(value, tuple(int(d) for d in tensor.shape.numpy()), (value,))
    node = value.producer()
    if node is None or not node.inputs:
        return None
    if is_op(node, *_SAME_SHAPE):
        inner = operand(node.inputs[0], outputs_axis)
        return None if inner is None else dataclasses.replace(inner, value=value)
    if is_op(node, "Transpose"):
        return _transposed(value, node, outputs_axis)
    if is_op(node, "Concat"):
        return _concatenated(value, node, outputs_axis)
    return None


def _transposed(value: ir.Value, node: ir.Node, outputs_axis: int) -> Operand | None:
    perm = node.attributes.get_ints("perm")
    axis = perm[outputs_axis] if perm else -1 - outputs_axis
    inner = operand(node.inputs[0], axis % 2 if perm is None else axis)
    if inner is None:
        return None
    order = perm or tuple(reversed(range(len(inner.shape))))
    return dataclasses.replace(inner, value=value, shape=tuple(inner.shape[i] for i in order))


def _concatenated(value: ir.Value, node: ir.Node, outputs_axis: int) -> Operand | None:
    parts = [operand(x, outputs_axis) for x in node.inputs]
    whole = [p for p in parts if p is not None]
    if len(whole) != len(parts):
        return None
    axis = node.attributes.get_int("axis", 0) % len(whole[0].shape)
    shape = list(whole[0].shape)
    shape[axis] = sum(p.shape[axis] for p in whole)
    stored = tuple(x for p in whole for x in p.stored)
    joined: tuple[tuple[ir.Value, int], ...] = ()
    if axis == outputs_axis and all(len(p.stored) == 1 for p in whole):
        joined = tuple((p.stored[0], p.shape[axis]) for p in whole)
    return Operand(value, tuple(shape), stored, joined)


def values_of(value: ir.Value) -> np.ndarray:
    """Return the numbers of a weight, as floats; the graph is followed back to stored tensors."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    assert node is not None
    inputs = [values_of(x) for x in _inputs(node)]
    if is_op(node, "Transpose"):
        return inputs[0].transpose(node.attributes.get_ints("perm"))
    if is_op(node, "Concat"):
        return np.concatenate(inputs, axis=node.attributes.get_int("axis", 0))
    if is_op(node, "Cast"):
        return inputs[0].astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if is_op(node, "DequantizeLinear"):
        return _dequantised(node, inputs)
    return inputs[0]


def _inputs(node: ir.Node) -> Iterator[ir.Value]:
    return (x for x in node.inputs if x is not None)


def _dequantised(node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray:
    numbers, scale = inputs[0], inputs[1]
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    wide = numbers.astype(np.float32)
    point = inputs[2].astype(np.float32) if len(inputs) > 2 else np.zeros_like(scale, np.float32)
    factor = scale.astype(np.float32)
    if block:
        size = wide.shape[axis]
        factor, point = (np.repeat(a, block, axis=axis).take(range(size), axis=axis)
                         for a in (factor, point))  # fmt: skip
    elif factor.ndim == 1 and factor.size > 1:
        sizes = [1] * wide.ndim
        sizes[axis] = -1
        factor, point = factor.reshape(sizes), point.reshape(sizes)
    return (wide - point) * factor


__all__ = ["Operand", "operand", "values_of"]
