"""Reductions and cumulative sums.

``axes`` may be absent, constant or computed. If it is absent or empty, the reduction covers all
axes or, with ``noop_with_empty_axes``, none. The formulas hold for all of these.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import undefined, vjp
from onnxtrain.graph.builder import OpBuilder

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def broadcast_reduced(op: OpBuilder, v: ir.Value, axes: ir.Value | None, keepdims: int) -> ir.Value:
    """Return ``v``, of the shape of a reduction, so that it broadcasts against what was reduced."""
    if keepdims or axes is None:
        return v
    known = op.constant(axes)
    return v if known is not None and known.size == 0 else op.Unsqueeze(v, axes)


def divide(op: OpBuilder, v: ir.Value, n: int | ir.Value) -> ir.Value:
    """Return ``v / n`` for a count ``n``, which may be more than half precision can hold."""
    if isinstance(n, int):
        return op.Mul(v, 1.0 / max(n, 1))
    if v.dtype not in _HALF:
        return op.Div(v, op.cast(n, v.dtype))
    return op.Mul(v, op.cast(op.Reciprocal(op.cast(n, ir.DataType.FLOAT)), v.dtype))


@vjp("ReduceSum")
def reduce_sum(op, dy, x, axes=None, *, keepdims):
    """Every summed element gets the gradient of its sum."""
    return op.expand_like(broadcast_reduced(op, dy, axes, keepdims), x)


@vjp("ReduceMean")
def reduce_mean(op, dy, x, axes=None, *, y, keepdims, noop_with_empty_axes):
    """Every element gets its part of the gradient of its mean."""
    chosen = [] if axes is None else op.axes(axes, op.rank(x))
    if chosen == [] and not noop_with_empty_axes:
        chosen = list(range(op.rank(x)))
    if chosen is None:
        # No result of elements is empty; the 1 keeps the division legal where x is.
        dy = divide(op, dy, op.Div(op.Size(x), op.Max(op.Size(y), 1)))
    elif chosen:
        dy = divide(op, dy, _count(op, x, chosen))
    return op.expand_like(broadcast_reduced(op, dy, axes, keepdims), x)


def _count(op: OpBuilder, x: ir.Value, axes: list[int]) -> int | ir.Value:
    """Return the number of elements along some axes, as a number or an int64 scalar."""
    sizes = [op.size(x, a) for a in axes]
    known = [s for s in sizes if isinstance(s, int)]
    if len(known) == len(sizes):
        return math.prod(known)
    if len(sizes) == op.rank(x):
        return op.Size(x)
    return op.ReduceProd(op.vector(sizes), keepdims=0)


@vjp("ReduceMax", "ReduceMin")
def reduce_extremum(op, dy, x, axes=None, *, y, keepdims, noop_with_empty_axes):
    """The gradient goes to the element that was taken; equal ones share it, as in torch.amax."""
    taken = op.Equal(x, broadcast_reduced(op, y, axes, keepdims))
    count = op.ReduceSum(
        op.Cast(taken, to=x.dtype), axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes
    )
    return op.Where(taken, op.Div(broadcast_reduced(op, dy, axes, keepdims), count), 0.0)


@vjp("ReduceProd")
def reduce_prod(op, dy, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``dx_i = dy`` times the product of the others, which is 0 if there is a zero among them.

    That product is the one over the elements that are not zero, times the zeros other than ``x_i``:
    nothing if there are none, their sum if there is one (value 0, but slope 1, for the second
    derivative), else 0. First and second derivatives are right at zeros, too.
    """

    def over(reduce, v):
        return reduce(v, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)

    zero = op.Equal(x, 0.0)
    rest = op.Where(zero, 1.0, x)
    others = op.Div(over(op.ReduceProd, rest), rest)
    flags = op.Cast(zero, to=x.dtype)
    count = op.Sub(over(op.ReduceSum, flags), flags)
    zeros = op.Where(zero, x, 0.0)
    single = op.Sub(over(op.ReduceSum, zeros), zeros)
    factor = op.Where(op.Equal(count, 0.0), 1.0, op.Where(op.Equal(count, 1.0), single, 0.0))
    return op.Mul(op.Mul(broadcast_reduced(op, dy, axes, keepdims), others), factor)


@vjp("ReduceL1")
def reduce_l1(op, dy, x, axes=None, *, keepdims):
    """``dx = dy sign(x)``."""
    return op.Mul(broadcast_reduced(op, dy, axes, keepdims), op.sign(x))


@vjp("ReduceL2")
def reduce_l2(op, dy, x, axes=None, *, y, keepdims):
    """``dx = dy x / y``; 0 where the norm is 0, as torch."""
    zero = op.Equal(y, 0.0)
    scale = op.Where(zero, 0.0, op.Div(dy, op.Where(zero, 1.0, y)))
    return op.Mul(x, broadcast_reduced(op, scale, axes, keepdims))


@vjp("ReduceSumSquare")
def reduce_sum_square(op, dy, x, axes=None, *, keepdims):
    """``dx = 2 x dy``."""
    return op.Mul(x, broadcast_reduced(op, op.Mul(dy, 2.0), axes, keepdims))


@vjp("ReduceLogSum")
def reduce_log_sum(op, dy, x, axes=None, *, y, keepdims):
    """``dx = dy / sum(x) = dy / e^y``."""
    return op.expand_like(broadcast_reduced(op, op.Div(dy, op.Exp(y)), axes, keepdims), x)


@vjp("ReduceLogSumExp")
def reduce_log_sum_exp(op, dy, x, axes=None, *, y, keepdims):
    """``dx = dy e^(x - y)``, which never overflows since ``x <= y``."""
    weights = op.Exp(op.Sub(x, broadcast_reduced(op, y, axes, keepdims)))
    return op.Mul(broadcast_reduced(op, dy, axes, keepdims), weights)


@vjp("CumSum")
def cum_sum(op, dy, x, axis, *, exclusive, reverse):
    """``dx`` is the running sum of ``dy`` the other way round."""
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)


@vjp("CumProd")
def cum_prod(op, dy, x, axis, *, exclusive, reverse):
    """``dx_i = before_i s_i``, right at zeros: nothing is divided.

    ``before_i`` is the product up to, without, ``x_i``. What follows is summed backwards:
    ``s_i = dy_i + x_(i+1) s_(i+1)``, or ``s_i = dy_(i+1) + x_(i+1) s_(i+1)`` if exclusive.
    """
    known = op.constant(axis)
    if known is None:
        return undefined("the axis of CumProd is computed at run time")
    at = int(known.reshape(())) % op.rank(x)
    carried = op.Squeeze(op.Slice(op.zeros_like(x), [0], [1], [at]), [at])
    slices = [op.Squeeze(op.Slice(v, [0], [1], [at]), [at]) for v in (dy, x)]
    step = op.body([carried, *slices])
    rest, dy_i, x_i = step.graph.inputs
    if exclusive:
        out = step.Identity(rest)
        following = step.Add(dy_i, step.Mul(x_i, rest))
    else:
        out = step.Add(dy_i, rest)
        following = step.Mul(x_i, out)
    step.graph.outputs.extend([following, out])
    way = 0 if reverse else 1
    _, s = op.Scan(
        *(carried, dy, x),
        body=step.graph,
        num_scan_inputs=2,
        scan_input_axes=[at, at],
        scan_input_directions=[way, way],
        scan_output_axes=[at],
        scan_output_directions=[way],
        _outputs=2,
    )
    before = op.CumProd(x, axis, exclusive=1, reverse=reverse)
    return op.Mul(before, s)
