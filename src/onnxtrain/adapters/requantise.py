"""Quantised layers with other weights: rounded anew, in the form that the file has."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.frozen_weights import packed_rows
from onnxtrain.adapters.layers import Layer
from onnxtrain.adapters.operand import operand, values_of
from onnxtrain.graph.nodes import key_of

_NBITS = "com.microsoft::MatMulNBits"
_PACKED = frozenset({_NBITS, "com.microsoft::MatMulBnb4", "com.microsoft::GatherBlockQuantized"})


def is_quantised(layer: Layer) -> bool:
    """Return whether the weights of a layer are stored in few bits."""
    if key_of(layer.node) in _PACKED:
        return True
    weight = operand(layer.node.inputs[0 if layer.kind == "embedding" else 1])
    return weight is not None and any(
        x.const_value is not None and not x.const_value.dtype.is_floating_point()
        for x in weight.stored
    )


def can_requantise(layer: Layer) -> bool:
    """Return whether :func:`requantise` knows the form: MatMulNBits without groups of columns."""
    node = layer.node
    if key_of(node) != _NBITS:
        return False
    inputs = [*node.inputs, None, None, None]
    points = inputs[3]
    packed = points is None or (points.dtype == ir.DataType.UINT8)
    own = all(x is None or x.is_initializer() for x in inputs[1:4])
    return inputs[4] is None and packed and own


def requantise(graph: ir.Graph, layer: Layer, weight: np.ndarray) -> None:
    """Let a layer have other weights, [inputs, outputs]: bits, blocks and zero points as before.

    A block whose numbers did not change keeps its scale, so that nothing is rounded twice.
    """
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    blocks = -(-layer.inputs // block)
    rows = np.zeros((layer.outputs, blocks * block), np.float32)
    rows[:, : layer.inputs] = weight.T
    before = packed_rows(node).reshape(layer.outputs, blocks, block)
    wide = rows.reshape(layer.outputs, blocks, block)
    same = (wide == before).all(-1)
    points = node.inputs[3] if len(node.inputs) > 3 else None
    old = values_of(_input(node, 2)).reshape(layer.outputs, blocks)
    if points is None:
        scales, zero = _symmetric(wide, bits)
        scales = np.where(same, old, scales)
    else:
        scales, zero = _with_points(wide, bits)
        keep = _unpacked(values_of(points).reshape(layer.outputs, -1), bits)[:, :blocks]
        scales, zero = np.where(same, old, scales), np.where(same, keep, zero)
    safe = np.where(scales == 0, 1.0, scales)
    codes = np.round(wide / safe[..., None]) + zero[..., None]
    numbers = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
    _replace(graph, node, 1, _pack(numbers.reshape(layer.outputs, -1), bits))
    _replace(graph, node, 2, scales)
    if points is not None:
        _replace(graph, node, 3, _pack(zero.astype(np.uint8), bits))


def _symmetric(wide: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales such that the number largest by amount is the lowest code, as the tools do."""
    middle = 1 << (bits - 1)
    place = np.abs(wide).argmax(-1)
    extreme = np.take_along_axis(wide, place[..., None], -1)[..., 0]
    return extreme / np.float32(-middle), np.full(extreme.shape, middle, np.float32)


def _with_points(wide: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points that cover a block from its smallest to its largest number."""
    low, high = np.minimum(wide.min(-1), 0), np.maximum(wide.max(-1), 0)
    top = np.float32((1 << bits) - 1)
    scales = (high - low) / top
    safe = np.where(scales == 0, 1.0, scales)
    return scales, np.clip(np.round(-low / safe), 0, top)


def _pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers of few bits in bytes along the last axis, the first in the lowest bits."""
    per = 8 // bits
    missing = -numbers.shape[-1] % per
    padded = np.pad(numbers, [(0, 0), (0, missing)]).reshape(numbers.shape[0], -1, per)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(padded << shifts, axis=-1).astype(np.uint8)


def _unpacked(raw: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(raw.shape[0], -1)


def _input(node: ir.Node, place: int) -> ir.Value:
    x = node.inputs[place]
    assert x is not None
    return x


def _replace(graph: ir.Graph, node: ir.Node, place: int, array: np.ndarray) -> None:
    """Put other numbers in the place of an initializer, in its shape and type."""
    x = _input(node, place)
    old = x.const_value
    assert old is not None
    shaped = array.astype(old.dtype.numpy()).reshape(old.shape.numpy())
    if len(x.uses()) > 1:  # somebody else reads it as well
        own = graph.initializers.get(f"{x.name}.merged")
        if own is None:
            own = ir.Value(name=f"{x.name}.merged", type=x.type, shape=x.shape)
            graph.register_initializer(_with(own, shaped, old.dtype))
        node.replace_input_with(place, own)
        return
    _with(x, shaped, old.dtype)


def _with(x: ir.Value, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    x.const_value = ir.Tensor(np.ascontiguousarray(array), dtype, name=x.name)
    return x


__all__ = ["can_requantise", "is_quantised", "requantise"]
