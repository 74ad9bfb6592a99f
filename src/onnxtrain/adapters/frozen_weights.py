"""The numbers of frozen layers, as floats: one layer at a time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.layers import CONV, EMBEDDING, Layer
from onnxtrain.adapters.operand import values_of
from onnxtrain.graph.nodes import is_op, key_of
from onnxtrain.graph.prepare.decompositions.contrib.packed_weights import Packed
from onnxtrain.graph.prepare.decompositions.contrib.quantised_products import BNB4


def frozen_weight(layer: Layer) -> np.ndarray:
    """Return the weights of a layer in float32.

    They are [inputs, outputs] of a linear layer, the kernel of a convolution, the table of an
    embedding.
    """
    node, key = layer.node, key_of(layer.node)
    if key == "com.microsoft::MatMulNBits":
        return packed_rows(node)[:, : layer.inputs].T
    if key == "com.microsoft::MatMulBnb4":
        return _bnb4(layer).T
    if key == "com.microsoft::GatherBlockQuantized":
        return _packed_table(layer)
    weight = node.inputs[0 if layer.kind == EMBEDDING else 1]
    assert weight is not None
    array = values_of(weight).astype(np.float32)
    if layer.kind in (CONV, EMBEDDING):
        return array
    if is_op(node, "Gemm"):
        array = array.T if node.attributes.get_int("transB", 0) else array
        return array * np.float32(node.attributes.get_float("alpha", 1.0))
    return array


def packed_rows(node: ir.Node) -> np.ndarray:
    """Return the weights of MatMulNBits, [N, blocks * block]: the last block may be filled up."""
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    n, k = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    packed = Packed(bits, block)
    blocks = -(-k // block)
    raw, scales, points, groups = (_array(node, i) for i in (1, 2, 3, 4))
    assert raw is not None
    assert scales is not None
    numbers = packed.unpack(raw.reshape(n, -1)).astype(np.float32)
    scales = scales.reshape(n, blocks).astype(np.float32)
    if points is None:
        middle = np.full_like(scales, packed.middle)
    elif points.dtype == np.uint8:
        middle = packed.unpack(points.reshape(n, -1))[:, :blocks].astype(np.float32)
    else:
        middle = points.reshape(n, blocks).astype(np.float32)
    if groups is not None:
        return (numbers[:, :k] - middle[:, groups]) * scales[:, groups]
    wide = numbers.reshape(n, blocks, block)
    return ((wide - middle[..., None]) * scales[..., None]).reshape(n, -1)


def _array(node: ir.Node, place: int) -> np.ndarray | None:
    x = node.inputs[place] if len(node.inputs) > place else None
    return None if x is None else values_of(x)


def _bnb4(layer: Layer) -> np.ndarray:
    """Return the weights of MatMulBnb4, [outputs, inputs]."""
    node = layer.node
    raw, largest = node.inputs[1], node.inputs[2]
    assert raw is not None
    assert largest is not None
    flat = values_of(raw).reshape(-1)
    codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)
    table = np.array(BNB4[node.attributes.get_int("quant_type", 1)], np.float32)
    block = node.attributes.get_int("block_size", 64)
    size = layer.inputs * layer.outputs
    scales = np.repeat(values_of(largest).reshape(-1).astype(np.float32), block)[:size]
    return (table[codes[:size]] * scales).reshape(layer.outputs, layer.inputs)


def _packed_table(layer: Layer) -> np.ndarray:
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 128)
    raw, scales, points = (_array(node, i) for i in (0, 2, 3))
    assert raw is not None
    assert scales is not None
    narrow = raw.dtype != np.uint8
    packed = Packed(8 if narrow else bits, block)
    numbers = raw.astype(np.float32) if narrow else packed.unpack(raw).astype(np.float32)
    middle = np.float32(0 if narrow else packed.middle)
    if points is not None:
        unpacked = points if narrow else packed.unpack(points)
        middle = np.repeat(unpacked.astype(np.float32), block, axis=1)[:, : numbers.shape[1]]
    wide = np.repeat(scales.astype(np.float32), block, axis=1)[:, : numbers.shape[1]]
    return (numbers - middle) * wide


__all__ = ["frozen_weight", "packed_rows"]
