"""Optimizer state in 8 bits: one byte per element, and a float32 scale per block of 256 elements.

Most elements are small beside the largest of their block, so the levels are dense near zero:
``sign(r) sqrt(|r|)`` in 255 levels for running means, ``r^(1/4)`` in 255 levels for running means
of squares, where ``r`` is the ratio to the largest. bitsandbytes and torchao look levels up in a
table; roots have a similar spacing, and QuantizeLinear rounds them in one pass. Squares never get
level 0: updates are divided by their root, and what was small must not become zero.

>>> from onnxtrain.optim import AdamW
>>> AdamW(state_bits=8).slots("w", (100, 300), ir.DataType.FLOAT)[0]
Slot(name='exp_avg', dims=(118, 256), dtype=UINT8, init=127.0)
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.transforms import Slot

BLOCK = 256
MIN_ELEMENTS = 4096
"""Smaller parameters keep state in 32 bits."""
_SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_CENTER, _LEVELS = 127, 255
_TINY = 1e-30


def fits(slot: Slot) -> bool:
    """Return whether a slot is stored in 8 bits."""
    large = math.prod(slot.dims) >= MIN_ELEMENTS
    return slot.name in _SLOTS and large and slot.dtype == ir.DataType.FLOAT


def stored(slot: Slot) -> list[Slot]:
    """Return the tensors that a slot is stored in: bytes and scales, a row per block."""
    blocks = -(-math.prod(slot.dims) // BLOCK)
    return [
        Slot(slot.name, (blocks, BLOCK), ir.DataType.UINT8, _zero_level(slot)),
        Slot(f"{slot.name}_scale", (blocks,), ir.DataType.FLOAT),
    ]


def dequantize(op: OpBuilder, slot: Slot, levels: ir.Value, scale: ir.Value) -> ir.Value:
    """Emit the values of a slot, in its own shape."""
    if op.target.lacks("uint8"):
        raise PrepareError(
            f"optimizer state in 8 bits: {op.target.name} has no 8-bit integers\n"
            "hint: state_bits=32"
        )
    root = op.DequantizeLinear(levels, scale, _zero_points(op, slot), axis=0)
    values = op.Mul(root, root if slot.nonnegative else op.Abs(root))
    if slot.nonnegative:
        values = op.Mul(values, values)
    count = math.prod(slot.dims)
    flat = op.Reshape(values, [-1])
    if count % BLOCK:
        flat = op.Slice(flat, [0], [count], [0])
    return op.Reshape(flat, list(slot.dims))


def quantize(op: OpBuilder, slot: Slot, values: ir.Value) -> dict[str, ir.Value]:
    """Emit the bytes and scales of new values; return them by the names of :func:`stored`."""
    if slot.nonnegative:
        values = op.Sqrt(values)  # onnxruntime shares it with the optimizer's own
    flat = op.Reshape(values, [-1])
    padding = -math.prod(slot.dims) % BLOCK
    if padding:
        flat = op.Concat(flat, op.full([padding], 0.0, ir.DataType.FLOAT), axis=0)
    # Three axes: QuantizeLinear of matrices was not found among the kernels of CUDA.
    blocks = op.Reshape(flat, [-1, 1, BLOCK])
    if slot.nonnegative:
        root = op.Sqrt(blocks)
        largest = op.ReduceMax(root, [1, 2], keepdims=0)
        scale = op.Mul(largest, 1.0 / _LEVELS)
    else:
        size = op.Abs(blocks)
        root = op.Div(blocks, op.Sqrt(op.Add(size, _TINY)))
        largest = op.ReduceMax(size, [1, 2], keepdims=0)
        scale = op.Mul(op.Sqrt(largest), 1.0 / _CENTER)
    scale = op.Max(scale, _TINY)
    levels = op.QuantizeLinear(root, scale, _zero_points(op, slot), axis=0)
    if slot.nonnegative:
        levels = op.Clip(levels, op.const(1, ir.DataType.UINT8))
    levels = op.Reshape(levels, [-1, BLOCK])
    return dict(zip([s.name for s in stored(slot)], (levels, scale), strict=True))


def _zero_level(slot: Slot) -> int:
    return 0 if slot.nonnegative else _CENTER


def _zero_points(op: OpBuilder, slot: Slot) -> ir.Value:
    """Return the level of zero for every block."""
    blocks = stored(slot)[1].dims
    return op.full(list(blocks), _zero_level(slot), ir.DataType.UINT8)
