"""Products with quantised weights, of the ``com.microsoft`` domain."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse, rms
from onnxtrain.graph.prepare.decompositions.contrib.packed_weights import (
    Packed,
    constant_bytes,
    dequantised,
)

# The 16 numbers of bitsandbytes' types: fractions with a sign, and quantiles of the normal law.
_FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
BNB4 = {0: [*_FP4, *(-v for v in _FP4)], 1: _NF4}
"""The number that each of 16 codes stands for, by ``quant_type``."""


@decomposition("com.microsoft::MatMulNBits")
def matmul_n_bits(
    op, a, b, scales, zero_points=None, g_idx=None, bias=None, *, K, N, accuracy_level=0, bits=4,
    block_size, node,
):  # fmt: skip
    """``A @ dequantised(B)^T``: the weights stay narrow, in the standard's packing."""
    packed = Packed(bits, block_size)
    if g_idx is None:
        weight = dequantised(op, b, scales, zero_points, packed, node, rows=N, width=K)
    else:
        weight = _by_group(op, b, scales, zero_points, g_idx, packed, N, K, node)
    y = op.MatMul(a, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _by_group(
    op: OpBuilder, b: ir.Value, scales: ir.Value, points: Any, g_idx: ir.Value, packed: Packed,
    n: int, k: int, node: ir.Node,
) -> ir.Value:  # fmt: skip
    """Return the weights where an index says which scale each column has."""
    raw = op.constant(b)
    if raw is None:
        refuse(node, "can be expressed for constant weights only")
    numbers = packed.unpack(raw.reshape(n, -1))[:, :k]
    table = op.const(numbers.astype(packed.dtype.numpy()), packed.dtype)
    blocks = -(-k // (packed.block or k))
    scale = op.Gather(op.Reshape(scales, [n, blocks]), g_idx, axis=1)
    wide = op.Cast(table, to=scales.dtype)
    if points is None:
        middle: Any = float(packed.middle)
    elif points.dtype != ir.DataType.UINT8:
        middle = op.Gather(op.Reshape(points, [n, blocks]), g_idx, axis=1)
    else:
        refuse(
            node,
            "groups of columns together with packed zero points, in whose place onnxruntime's "
            "kernel for CPUs takes the middle of the range\nhint: give the zero points as floats",
        )
    return op.Mul(op.Sub(wide, middle), scale)


@decomposition("com.microsoft::MatMulNBitsMlp")
def matmul_n_bits_mlp(
    op, a, skip=None, norm=None, gate_b: Any = None, gate_scales: Any = None, gate_bias=None,
    up_b: Any = None, up_scales: Any = None, up_bias=None, *, K, N, activation, bits=4, block_size,
    accuracy_level=0, epsilon=1e-5, node,
):  # fmt: skip
    """``act(gate(x)) * up(x)`` of the normalised ``x``; the second output is ``a + skip``."""
    total = a if skip is None else op.Add(a, skip)
    x = total if norm is None else rms(op, total, norm, epsilon)
    form = {"K": K, "N": N, "bits": bits, "block_size": block_size, "node": node}
    gate = matmul_n_bits(op, x, gate_b, gate_scales, bias=gate_bias, **form)
    up = matmul_n_bits(op, x, up_b, up_scales, bias=up_bias, **form)
    if activation not in ("silu", "swish"):
        refuse(node, f"unknown activation {activation!r}")
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up), total


@decomposition("com.microsoft::MatMulNBitsQkv")
def matmul_n_bits_qkv(
    op, a, skip=None, norm=None, q_b: Any = None, q_scales: Any = None, q_bias=None,
    k_b: Any = None, k_scales: Any = None, k_bias=None, v_b: Any = None, v_scales: Any = None,
    v_bias=None, *, K, Nq, Nkv, bits=4, block_size, accuracy_level=0, epsilon=1e-6, node,
):  # fmt: skip
    """Queries, keys and values of the normalised input; the fourth output is ``a + skip``."""
    total = a if skip is None else op.Add(a, skip)
    x = total if norm is None else rms(op, total, norm, epsilon)
    form = {"K": K, "bits": bits, "block_size": block_size, "node": node}
    q = matmul_n_bits(op, x, q_b, q_scales, bias=q_bias, N=Nq, **form)
    k = matmul_n_bits(op, x, k_b, k_scales, bias=k_bias, N=Nkv, **form)
    v = matmul_n_bits(op, x, v_b, v_scales, bias=v_bias, N=Nkv, **form)
    return q, k, v, total


@decomposition("com.microsoft::MatMulBnb4")
def matmul_bnb4(op, a, b, absmax, *, K, N, block_size, quant_type, transB=1, training_mode=0, node):
    """``A @ W^T`` of bitsandbytes' 4 bits: numbers of a table, times the largest of a block."""
    raw = op.constant(b)
    if raw is None:
        refuse(node, "can be expressed for constant weights only")
    flat = raw.reshape(-1)
    numbers = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[: N * K]  # high bits first
    table = BNB4[int(bool(quant_type))]
    blocks = -(-N * K // block_size)
    padded = np.concatenate([numbers, np.zeros(blocks * block_size - N * K, numbers.dtype)])
    codes = op.const(padded.reshape(blocks, block_size).astype(np.uint8), ir.DataType.UINT8)
    values = op.Gather(op.const(table, absmax.dtype), op.Cast(codes, to=ir.DataType.INT32), axis=0)
    wide = op.Mul(values, op.Unsqueeze(op.Reshape(absmax, [-1]), [1]))
    line = op.Reshape(wide, [-1])
    weight = op.Reshape(op.Slice(line, [0], [N * K], [0]), [N, K])
    return op.MatMul(a, op.Transpose(weight, perm=[1, 0]) if transB else weight)


@decomposition("com.microsoft::GatherBlockQuantized")
def gather_block_quantized(
    op, data, indices, scales, zero_points=None, *, bits=4, block_size=128, gather_axis=0,
    quantize_axis=1, node,
):  # fmt: skip
    """Rows of a quantised table, as floats: rows are picked first, then dequantised."""
    raw = constant_bytes(op, data)
    rank = op.rank(data)
    if raw is None or gather_axis % rank != 0 or quantize_axis % rank != rank - 1:
        refuse(node, "only constant tables, rows along the first axis, blocks along the last")
    narrow = data.dtype in (ir.DataType.UINT4, ir.DataType.INT4)
    packed = Packed(8 if narrow else bits, block_size)
    numbers = raw if narrow else packed.unpack(raw)
    middle = 0 if narrow else packed.middle
    points: Any = None
    if zero_points is not None:
        points = op.constant(zero_points)
        if points is None:
            refuse(node, "zero points that are computed")
        points = points if narrow else packed.unpack(points)
    return _rows(op, numbers, indices, scales, points, middle, block_size)


def _rows(
    op: OpBuilder, numbers: np.ndarray, indices: ir.Value, scales: ir.Value, points: Any,
    middle: int, block: int,
) -> ir.Value:  # fmt: skip
    kind = np.int8 if numbers.dtype.kind == "i" or numbers.min(initial=0) < 0 else np.uint8
    table = numbers.astype(kind)
    blocks = -(-table.shape[-1] // block)
    missing = blocks * block - table.shape[-1]
    table = np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, missing)])
    table = table.reshape(*table.shape[:-1], blocks, block)
    rows = op.Cast(op.Gather(op.const(table), indices, axis=0), to=scales.dtype)
    zero: Any = float(middle)
    if points is not None:
        whole = points[..., :blocks].astype(np.float32)
        picked = op.Gather(op.const(whole, scales.dtype), indices, axis=0)
        zero = op.Unsqueeze(picked, [-1])
    scale = op.Unsqueeze(op.Gather(scales, indices, axis=0), [-1])
    wide = op.Mul(op.Sub(rows, zero), scale)
    y = op.Reshape(wide, [*[0] * (op.rank(wide) - 2), -1])
    return y if not missing else op.Slice(y, [0], [-missing], [-1])
