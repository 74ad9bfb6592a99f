"""Optimizer state in 8 bits: one byte per element, and a float32 scale per block of 256 elements.

A block is divided by its largest absolute value. What remains, ``r`` in [-1, 1], is small for most
elements, so the levels are dense near zero: ``sign(r) sqrt(|r|)`` in 255 levels for running means,
``r^(1/4)`` in 256 levels for running means of squares. bitsandbytes and torchao look levels up in a
table; these formulas have a similar spacing and need no search. A square that is not zero never
becomes zero, because updates are divided by its root.

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
_CENTER, _LEVELS = 127.0, 255.0
_TINY = 1e-38


def fits(slot: Slot) -> bool:
    """Return whether a slot is stored in 8 bits."""
    large = math.prod(slot.dims) >= MIN_ELEMENTS
    return slot.name in _SLOTS and large and slot.dtype == ir.DataType.FLOAT


def stored(slot: Slot) -> list[Slot]:
    """Return the tensors that a slot is stored in: bytes and scales, a row per block."""
    blocks = -(-math.prod(slot.dims) // BLOCK)
    return [
        Slot(slot.name, (blocks, BLOCK), ir.DataType.UINT8, 0.0 if slot.nonnegative else _CENTER),
        Slot(f"{slot.name}_scale", (blocks, 1), ir.DataType.FLOAT),
    ]


def dequantize(op: OpBuilder, slot: Slot, levels: ir.Value, scale: ir.Value) -> ir.Value:
    """Emit the values of a slot, in its own shape."""
    if op.target.lacks("uint8"):
        raise PrepareError(
            f"optimizer state in 8 bits: {op.target.name} has no 8-bit integers\n"
            "hint: state_bits=32"
        )
    x = op.cast(levels, ir.DataType.FLOAT)
    if slot.nonnegative:
        x = op.Mul(x, 1.0 / _LEVELS)
        x = op.Mul(x, x)
        values = op.Mul(op.Mul(x, x), scale)
    else:
        x = op.Mul(op.Sub(x, _CENTER), 1.0 / _CENTER)
        values = op.Mul(op.Mul(x, op.Abs(x)), scale)
    count = math.prod(slot.dims)
    flat = op.Reshape(values, [-1])
    if count % BLOCK:
        flat = op.Slice(flat, [0], [count], [0])
    return op.Reshape(flat, list(slot.dims))


def quantize(op: OpBuilder, slot: Slot, values: ir.Value) -> dict[str, ir.Value]:
    """Emit the bytes and scales of new values; return them by the names of :func:`stored`."""
    flat = op.Reshape(values, [-1])
    padding = -math.prod(slot.dims) % BLOCK
    if padding:
        flat = op.Concat(flat, op.full([padding], 0.0, ir.DataType.FLOAT), axis=0)
    blocks = op.Reshape(flat, [-1, BLOCK])
    size = blocks if slot.nonnegative else op.Abs(blocks)
    scale = op.ReduceMax(size, [1], keepdims=1)
    ratio = op.Div(size, op.Max(scale, _TINY))
    root = op.Sqrt(ratio)
    if slot.nonnegative:
        level = op.Add(op.Mul(op.Sqrt(root), _LEVELS), 0.5)
        level = op.Where(op.Greater(ratio, 0.0), op.Max(level, 1.0), level)
    else:
        signed = op.Where(op.Less(blocks, 0.0), op.Neg(root), root)
        level = op.Add(op.Mul(signed, _CENTER), _CENTER + 0.5)
    names = [s.name for s in stored(slot)]
    return dict(zip(names, (op.cast(level, ir.DataType.UINT8), scale), strict=True))
