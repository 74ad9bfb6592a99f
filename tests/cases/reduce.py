"""Cases for reductions and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.cases.base import Draw, OpCase, at, away_from_zero, const, distinct, f, ints, positive


def _over(reduce: Callable[..., torch.Tensor], keepdims: bool = True) -> Callable:
    """The oracle for a torch reduction that takes a tuple of axes."""

    def oracle(x: torch.Tensor, axes=None) -> torch.Tensor:
        chosen = torch.as_tensor(axes if axes is not None else []).reshape(-1).tolist()
        return reduce(x, tuple(chosen) or tuple(range(x.ndim)), keepdims)

    return oracle


def _prod(x, axes, keepdims):
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims)
    return x


def _norm(p):
    return lambda x, axes, keepdims: torch.linalg.vector_norm(x, p, axes, keepdim=keepdims)


def _family(op: str, draw: Callable[..., Draw], reduce, elementwise) -> list[OpCase]:
    """Every way to say which axes."""
    all_axes, runtime = draw(2, 3, 2), ints([-1, 0])
    squeezed = {"keepdims": 0}
    ranked = {"dynamic": "batch: the number of axes decides the rank of the result"}
    noop = {"noop_with_empty_axes": 1}
    return [
        OpCase(op, (draw(2, 3, 2), const([1])), torch=_over(reduce)),
        OpCase(op, (all_axes,), torch=_over(reduce), id="all"),
        OpCase(op, (all_axes,), squeezed, torch=_over(reduce, False), id="all-squeezed"),
        OpCase(
            op, (draw(2, 3, 2), const([-1, 0])), squeezed, torch=_over(reduce, False), id="negative"
        ),
        OpCase(op, (draw(2, 3, 2), runtime), torch=_over(reduce), id="runtime"),
        OpCase(
            op,
            (draw(2, 3, 2), runtime),
            squeezed,
            torch=_over(reduce, False),
            id="runtime-squeezed",
            **ranked,
        ),
        OpCase(op, (all_axes, const([])), torch=_over(reduce), id="empty"),
        OpCase(op, (all_axes, const([])), noop, torch=lambda x, a: elementwise(x), id="noop"),
        OpCase(
            op,
            (draw(2, 3), ints([])),
            {**noop, **squeezed},
            torch=lambda x, a: elementwise(x),
            id="noop-runtime",
            **ranked,
        ),
        # The reference evaluator's log-sum-exp refuses a scalar.
        OpCase(op, (draw(),), squeezed, torch=elementwise, id="scalar", forward="torch"),
    ]


def _same(x):
    return x * 1.0


CASES = [
    *_family("ReduceSum", f, torch.sum, _same),
    *_family("ReduceMean", f, torch.mean, _same),
    *_family("ReduceMax", distinct, torch.amax, _same),
    *_family("ReduceMin", distinct, torch.amin, _same),
    *_family("ReduceProd", away_from_zero, _prod, _same),
    *_family("ReduceL1", away_from_zero, _norm(1), torch.abs),
    *_family("ReduceL2", away_from_zero, _norm(2), torch.abs),
    *_family("ReduceSumSquare", f, lambda x, a, k: (x * x).sum(a, k), torch.square),
    *_family("ReduceLogSum", positive, lambda x, a, k: x.sum(a, k).log(), torch.log),
    *_family("ReduceLogSumExp", f, torch.logsumexp, _same),
    OpCase(
        "ReduceMax",
        (at([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), const([1])),
        torch=_over(torch.amax),
        id="tie",
        xfail="finite: the value is on a kink",
    ),
    OpCase(
        "ReduceMin",
        (at([[1.0, 1.0, 3.0], [2.0, 2.0, 2.0]]), const([1])),
        torch=_over(torch.amin),
        id="tie",
        xfail="finite: the value is on a kink",
    ),
    OpCase(
        "ReduceProd",
        (at([[1.5, -2.0, 3.0], [0.0, -2.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]), const([1])),
        torch=_over(_prod),
        id="zeros",
    ),
    OpCase("ReduceProd", (at([[0.0, -2.0], [3.0, 4.0]]),), torch=_over(_prod), id="zero-in-all"),
    OpCase(
        "ReduceL1",
        (at([[0.0, 0.0], [3.0, -4.0]]), const([1])),
        torch=_over(_norm(1)),
        id="zero",
    ),
    OpCase(
        "ReduceL2",
        (at([[0.0, 0.0], [3.0, 4.0]]), const([1])),
        torch=_over(_norm(2)),
        id="zero",
        order=1,  # torch's second derivative of a norm is NaN at 0
    ),
    OpCase(
        "ReduceLogSumExp",
        (at([[1000.0, 999.0], [-1000.0, -1002.0]]), const([-1])),
        {"keepdims": 0},
        torch=_over(torch.logsumexp, False),
        id="far",
        tol=1e-3,  # float32 resolves 1000 to 6e-5
        forward="torch",
    ),
    OpCase("CumSum", (f(3, 4), const(1)), torch=lambda x, a: x.cumsum(1)),
    OpCase(
        "CumSum",
        (f(3, 4), const(-2)),
        {"reverse": 1},
        torch=lambda x, a: x.flip(0).cumsum(0).flip(0),
        id="reverse",
    ),
    OpCase(
        "CumSum",
        (f(3, 4), ints(1)),
        {"exclusive": 1},
        torch=lambda x, a: x.cumsum(1) - x,
        id="exclusive",
    ),
    OpCase(
        "CumSum",
        (f(3, 4), ints(-2)),
        {"exclusive": 1, "reverse": 1},
        torch=lambda x, a: x.flip(0).cumsum(0).flip(0) - x,
        id="both",
    ),
    OpCase(
        "CumProd", (f(3, 4), const(1)), torch=lambda x, a: x.cumprod(1), opset=26, forward="torch"
    ),
    OpCase(
        "CumProd",
        (at([[1.5, 0.0, 2.0, 3.0], [0.0, 2.0, 0.0, 1.0]]), const(-1)),
        {"reverse": 1},
        torch=lambda x, a: x.flip(1).cumprod(1).flip(1),
        id="reverse-zeros",
        opset=26,
        forward="torch",
    ),
    OpCase(
        "CumProd",
        (f(3, 4), const(0)),
        {"exclusive": 1},
        torch=lambda x, a: torch.cat([torch.ones(1, 4), x[:-1]]).cumprod(0),
        id="exclusive",
        opset=26,
        forward="torch",
    ),
    OpCase(
        "CumProd",
        (f(3, 4), const(0)),
        {"exclusive": 1, "reverse": 1},
        torch=lambda x, a: torch.cat([x[1:], torch.ones(1, 4)]).flip(0).cumprod(0).flip(0),
        id="both",
        opset=26,
        forward="torch",
    ),
]
