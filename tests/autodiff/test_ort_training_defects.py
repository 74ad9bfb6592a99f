"""Operators for which the training build of ONNX Runtime was wrong, crashed or refused.

Each case is compared with torch in float64, with static, batch-dynamic and fully dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.cases import checks
from tests.cases.base import OpCase, away_from_zero, const, distinct, f, fixed, ints, positive

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def padded(x: torch.Tensor, before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
    """Zero-pad the trailing axes."""
    pairs = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return F.pad(x, pairs)


def average_pool(
    kernel: Sequence[int],
    stride: Sequence[int] | int = 1,
    before: Sequence[int] | None = None,
    after: Sequence[int] | None = None,
    dilation: Sequence[int] | int = 1,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return average pooling without padding in the count: window sums over window sizes."""
    n = len(kernel)
    none = [0] * n

    def run(x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype)

        def sums(v: torch.Tensor) -> torch.Tensor:
            v = padded(v, before or none, after or none)
            return CONV[n](v, ones, stride=stride, dilation=dilation, groups=v.shape[1])

        return sums(x) / sums(torch.ones_like(x))

    return run


def conv_same(before: Sequence[int], after: Sequence[int], stride: int) -> Callable[..., Any]:
    """Return a 2-D convolution with the padding of SAME_UPPER or SAME_LOWER."""
    return lambda x, w: F.conv2d(padded(x, before, after), w, stride=stride)


def frozen_batch_norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> torch.Tensor:
    """Apply BatchNorm with fixed statistics."""
    return F.batch_norm(x, mean, var, scale, bias, training=False, eps=1e-5)


def scattered(reduce: str) -> Callable[..., torch.Tensor]:
    """Return ScatterElements on axis 0 with a reduction."""
    return lambda x, i, u: x.scatter_reduce(0, i, u, reduce=reduce, include_self=True)


INDICES = [[0, 2, 1], [2, 0, 3]]  # no row twice in a column: no ties, no lost writes

DEFECTS = [
    OpCase(
        "Conv",
        (f(2, 3, 6, 7), f(4, 3, 3, 2)),
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 2], "strides": [2, 2]},
        torch=conv_same([0, 0], [1, 1], 2),
        id="auto-pad-same-upper",
    ),
    OpCase(
        "Conv",
        (f(2, 3, 6, 7), f(4, 3, 3, 2)),
        {"auto_pad": "SAME_LOWER", "kernel_shape": [3, 2], "strides": [2, 2]},
        torch=conv_same([1, 1], [0, 0], 2),
        id="auto-pad-same-lower",
    ),
    OpCase(
        "AveragePool",
        (f(2, 3, 6, 7),),
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 2], "strides": [2, 2]},
        torch=average_pool([3, 2], 2, [0, 0], [1, 1]),
        id="auto-pad-same-upper",
    ),
    OpCase(
        "MaxPool",
        (distinct(2, 3, 6, 7),),
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 2], "strides": [2, 2]},
        torch=lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-100.0), (3, 2), 2),
        id="auto-pad-same-upper",
    ),
    OpCase(
        "AveragePool",
        (f(3, 2, 5, 5),),
        {"kernel_shape": [2, 2], "strides": [1, 1]},
        torch=average_pool([2, 2]),
        id="dynamic-batch",
    ),
    OpCase(
        "AveragePool",
        (f(2, 2, 7, 8),),
        {"kernel_shape": [2, 3], "dilations": [2, 2], "pads": [1, 0, 1, 1]},
        torch=average_pool([2, 3], 1, [1, 0], [1, 1], 2),
        id="dilations",
    ),
    OpCase(
        "AveragePool",
        (f(1, 2, 4, 5, 4),),
        {"kernel_shape": [3, 3, 2], "strides": [1, 1, 1]},
        torch=average_pool([3, 3, 2]),
        id="3d-overlapping",
    ),
    OpCase(
        "MaxPool",
        (distinct(1, 2, 5, 6),),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        torch=lambda x: F.max_pool2d(x, 2, 2),
        id="dynamic-height-width",
    ),
    OpCase(
        "BatchNormalization",
        (f(4, 3, 2, 2), f(3), f(3), fixed(f(3)), fixed(positive(3))),
        torch=frozen_batch_norm,
        id="frozen-statistics",
    ),
    OpCase(
        "Split",
        (f(4, 6), const([1, 2, 3])),
        {"axis": 1},
        torch=lambda x, sizes: (x[:, :1], x[:, 3:]),
        outputs=("y0", "_unused", "y2"),
        id="partly-used",
    ),
    OpCase(
        "Where",
        (const([[True], [False], [True]]), f(4), f(3, 1)),
        torch=lambda c, x, y: torch.where(torch.tensor(c), x, y),
        id="broadcast",
    ),
    OpCase("Pow", (positive(4), f(3, 1)), torch=torch.pow, id="broadcast-both-inputs"),
    OpCase(
        "Pow",
        (away_from_zero(3, 4), const(3.0)),
        torch=lambda x, p: x**3,
        id="negative-base",
    ),
    *(
        OpCase(
            "ScatterElements",
            (away_from_zero(4, 3), ints(INDICES), distinct(2, 3)),
            {"axis": 0, "reduction": onnx_name},
            torch=scattered(torch_name),
            id=f"reduction-{onnx_name}",
        )
        for onnx_name, torch_name in (
            ("add", "sum"),
            ("mul", "prod"),
            ("max", "amax"),
            ("min", "amin"),
        )
    ),
    OpCase(
        "ScatterND",
        (f(5, 3), ints([[1], [4], [1]]), f(3, 3)),
        {"reduction": "add"},
        torch=lambda x, i, u: x.index_add(0, i[:, 0], u),
        id="reduction-add",
    ),
    OpCase(
        "ScatterND",
        (positive(5, 3), ints([[1], [4]]), positive(2, 3)),
        {"reduction": "mul"},
        torch=lambda x, i, u: x * torch.ones_like(x).index_copy(0, i[:, 0], u),
        id="reduction-mul",
    ),
    OpCase(
        "Gelu",
        (f(3, 5),),
        {"approximate": "tanh"},
        torch=lambda x: F.gelu(x, approximate="tanh"),
        tol=1e-5,  # the erf form is 1e-3 away
        id="tanh",
    ),
    OpCase("MatMul", (f(3, 4), f(4)), torch=torch.matmul, id="vector-parameter"),
    OpCase(
        "Gemm",
        (f(3, 4), f(4, 2), f(2)),
        {"alpha": 1.0, "beta": 0.0},
        torch=lambda a, b, c: a @ b + 0 * c,
        id="beta-zero",
    ),
    OpCase(
        "LayerNormalization",
        (f(3, 5), f(5)),
        {"axis": -1},
        torch=lambda x, w: F.layer_norm(x, (5,), w, eps=1e-5),
        id="no-bias-one-output",
    ),
    OpCase(
        "ReduceL2",
        (f(3, 4, 2),),
        {"axes": [1], "keepdims": 0},
        torch=lambda x: x.norm(dim=1),
        opset=13,
        id="keepdims-0-opset-13",
    ),
    OpCase(
        "ReduceLogSumExp",
        (f(3, 4, 2),),
        {"axes": [0, 2], "keepdims": 0},
        torch=lambda x: x.logsumexp((0, 2)),
        opset=13,
        id="keepdims-0-opset-13",
    ),
    OpCase(
        "Pad",
        (f(3, 4), const([2, 1]), None, const([1])),
        {"mode": "reflect"},
        torch=lambda x, pads, value, axes: F.pad(x[None], (2, 1), mode="reflect")[0],
        id="reflect-with-axes",
    ),
    OpCase(
        "Clip",
        (distinct(3, 4),),
        {"min": -0.5, "max": 1.0},
        torch=lambda x: x.clamp(-0.5, 1.0),
        opset=9,
        id="attributes-opset-9",
    ),
    OpCase("Transpose", (f(2, 3, 4),), torch=lambda x: x.permute(2, 1, 0), id="no-perm"),
    OpCase(
        "SoftmaxCrossEntropyLoss",
        (f(4, 3), ints([0, 2, 1, 2])),
        torch=F.cross_entropy,
        id="one-output",
    ),
    OpCase(
        "Resize",
        (f(1, 2, 3, 4), None, const([1.0, 1.0, 2.0, 2.0])),
        {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        },
        torch=lambda x, roi, scales: F.interpolate(x, scale_factor=2, mode="nearest"),
        id="nearest-on-cpu",
    ),
    OpCase(
        "ConvTranspose",
        (f(2, 3, 4, 4), f(3, 2, 3, 3)),
        {"strides": [2, 2]},
        torch=lambda x, w: F.conv_transpose2d(x, w, stride=2),
        id="on-cpu",
    ),
]


@pytest.mark.parametrize("case", DEFECTS, ids=lambda case: case.name)
def test_equals_torch(case: OpCase) -> None:
    checks.oracle(case)


@pytest.mark.parametrize("case", DEFECTS, ids=lambda case: case.name)
def test_dynamic_shapes_equal_static(case: OpCase) -> None:
    checks.dynamic(case)
