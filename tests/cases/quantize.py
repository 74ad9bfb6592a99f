"""Cases for quantized tensors with trainable scales."""

from __future__ import annotations

import numpy as np
import torch

from tests.cases.base import OpCase, distinct, ints, positive

ROWS = [[-7, 3, 120], [5, 0, -128]]
# There is no float64 DequantizeLinear, hence forward="torch".
EIGHT = np.arange(-20, 20, dtype=np.int8).reshape(2, 10, 2)


def per_axis(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int, axis: int):
    shape = [1] * x.dim()
    shape[axis] = -1
    zero = zero.double().reshape(shape) if isinstance(zero, torch.Tensor) else zero
    return (x.double() - zero) * scale.reshape(shape)


def blocked(x: torch.Tensor, scale: torch.Tensor, axis: int, block: int) -> torch.Tensor:
    wide = scale.repeat_interleave(block, axis)
    return x.double() * wide.narrow(axis, 0, x.shape[axis])


CASES = [
    OpCase(
        "DequantizeLinear",
        (ints(ROWS, np.int8), positive(), ints(3, np.int8)),
        torch=lambda x, s, z: (x.double() - 3) * s,
        forward="torch",
    ),
    OpCase(
        "DequantizeLinear",
        (ints([[1, 200], [3, 255]], np.uint8), positive(2)),
        {"axis": -2},
        torch=lambda x, s: per_axis(x, s, 0, 0),
        forward="torch",
        id="per-axis-no-zero-point",
    ),
    OpCase(
        "DequantizeLinear",
        (ints(EIGHT, np.int8), positive(10), ints(np.arange(10), np.int8)),
        torch=lambda x, s, z: per_axis(x, s, z, 1),
        forward="torch",
        id="per-axis",
    ),
    OpCase(
        "DequantizeLinear",
        (ints(EIGHT, np.int8), positive(2, 5, 2)),
        {"block_size": 2},
        torch=lambda x, s: blocked(x, s, 1, 2),
        forward="torch",
        id="blocks",
    ),
    OpCase(
        "DequantizeLinear",
        (ints(EIGHT, np.int8), positive(2, 4, 2)),
        {"block_size": 3, "axis": -2},
        torch=lambda x, s: blocked(x, s, 1, 3),
        forward="torch",
        id="blocks-short-last",
    ),
    OpCase(
        "DequantizeLinear",
        (ints([5, -6], np.int32), positive(1)),
        torch=lambda x, s: x.double() * s,
        forward="torch",
        id="int32",
    ),
    OpCase(
        "DynamicQuantizeLinear",
        (distinct(3, 4),),
        torch=lambda x: (x.max() - x.min()) / 255,
        outputs=["_y", "scale", "_zero"],
        forward="torch",
    ),
    OpCase(
        "DynamicQuantizeLinear",
        (positive(5),),
        torch=lambda x: x.max() / 255,
        outputs=["_y", "scale", "_zero"],
        forward="torch",
        id="positive",
    ),
]
