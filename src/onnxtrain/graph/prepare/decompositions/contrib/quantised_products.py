"""Products with quantised weights, of the ``com.microsoft`` domain."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition


@decomposition("com.microsoft::MatMulNBits")
def matmul_n_bits(
    op, a, b, scales, zero_points=None, g_idx=None, bias=None, *, K, N, accuracy_level=0, bits=4,
    block_size=32, node,
):  # fmt: skip
    """``A @ dequantised(B)^T``: the weights stay 4 bits wide, in the standard's packing."""
    packed, points = op.constant(b), op.constant(zero_points)
    if bits not in (4, 8) or packed is None or g_idx is not None:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} can be expressed for constant 4 or 8 bit "
            "weights only"
        )
    if zero_points is not None and (points is None or points.dtype != np.uint8):
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} has zero points that are not packed constants"
        )
    blocks = -(-K // block_size)
    flat = _unpack(packed.reshape(N, -1), bits)[:, : blocks * block_size]
    if points is None:
        zeros = np.full((N, blocks), 1 << (bits - 1), np.uint8)
    else:
        zeros = _unpack(points.reshape(N, -1), bits)[:, :blocks]
    narrow = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    weight = op.DequantizeLinear(
        _narrow(op, flat, narrow),
        op.Reshape(scales, [N, blocks]),
        _narrow(op, zeros, narrow),
        axis=1,
        block_size=block_size,
    )
    if blocks * block_size != K:
        weight = op.Slice(weight, [0], [K], [1])
    y = op.MatMul(a, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def _narrow(op: OpBuilder, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    return op.const(array.astype(dtype.numpy()), dtype)
