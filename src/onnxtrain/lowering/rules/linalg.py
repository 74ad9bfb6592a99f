"""Products of matrices, powers and remainders.

Reductions and running sums.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.expand.fourier import det, dft
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.dims import expand_equation
from onnxtrain.lowering.lowerings import lower

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


@lower("Gemm")
def gemm(op, a, b, c=None, *, alpha, beta, transA, transB):  # noqa: N803 - the attributes' names
    """``alpha a b + beta c``."""
    y = op.MatMul(op.mT(a) if transA else a, op.mT(b) if transB else b)
    y = y if alpha == 1.0 else op.Mul(y, alpha)
    if c is None:
        return y
    return op.Add(y, c if beta == 1.0 else op.Mul(c, beta))


@lower("Einsum")
def einsum(op, *operands, equation):
    """Two operands at a time: batch letters first, then one product of matrices."""
    eq = expand_equation(equation, [op.rank(x) for x in operands])
    if eq is None or any(len(set(t)) != len(t) for t in eq.terms):
        return None
    if not _sizes_agree(op, eq.terms, operands):
        return None
    y, term = operands[0], eq.terms[0]
    for i, x in enumerate(operands[1:], 1):
        later = set("".join(eq.terms[i + 1 :])) | set(eq.output)
        y, term = _pair(op, y, term, x, eq.terms[i], later)
    y, term = _without(op, y, term, set(eq.output))
    if term != eq.output:
        y = op.Transpose(y, perm=[term.index(c) for c in eq.output])
    return op.Identity(y) if y is operands[0] else y


def _sizes_agree(op: OpBuilder, terms, operands) -> bool:
    """Return whether no letter broadcasts: its size is the same everywhere."""
    sizes: dict[str, set] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, d in zip(term, op.dims(x), strict=True):
            sizes.setdefault(letter, set()).add(d)
    return all(len(s) == 1 for s in sizes.values())


def _without(op: OpBuilder, x: ir.Value, term: str, kept: set[str]) -> tuple[ir.Value, str]:
    """Sum over the letters that nobody asks for."""
    axes = [i for i, c in enumerate(term) if c not in kept]
    if not axes:
        return x, term
    return op.ReduceSum(x, axes, keepdims=0), "".join(c for c in term if c in kept)


def _pair(op: OpBuilder, a, left: str, b, right: str, later: set[str]):
    a, left = _without(op, a, left, later | set(right))
    b, right = _without(op, b, right, later | set(left))
    batch = [c for c in left if c in right and c in later]
    inner = [c for c in left if c in right and c not in later]
    rows = [c for c in left if c not in right]
    columns = [c for c in right if c not in left]
    size = {c: op.size(a, i) for i, c in enumerate(left)}
    size |= {c: op.size(b, i) for i, c in enumerate(right) if c not in size}
    if not inner:
        # An outer product: multiply with room for the other's letters.
        order = [*batch, *rows, *columns]
        return op.Mul(
            _broadcast_term(op, a, left, order), _broadcast_term(op, b, right, order)
        ), "".join(order)
    a2 = _matrix(op, a, left, batch, rows, inner, size)
    b2 = _matrix(op, b, right, batch, inner, columns, size)
    y = op.MatMul(a2, b2)
    order = [*batch, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        y = _reshape(op, y, [size[c] for c in order])
    return y, "".join(order)


def _broadcast_term(op: OpBuilder, x: ir.Value, term: str, order: list[str]) -> ir.Value:
    kept = [c for c in order if c in term]
    if kept != list(term):
        x = op.Transpose(x, perm=[term.index(c) for c in kept])
    missing = [i for i, c in enumerate(order) if c not in term]
    return op.Unsqueeze(x, missing) if missing else x


def _matrix(op: OpBuilder, x: ir.Value, term: str, batch, first, second, size) -> ir.Value:
    """[batch..., first..., second...] with each group of letters made one axis."""
    order = [*batch, *first, *second]
    if order != list(term):
        x = op.Transpose(x, perm=[term.index(c) for c in order])
    if len(first) == len(second) == 1:
        return x
    sizes = [size[c] for c in batch]
    return _reshape(op, x, [*sizes, _product(size, first), _product(size, second)])


def _product(size: dict, letters: list[str]):
    values = [size[c] for c in letters]
    if all(isinstance(v, int) for v in values):
        return math.prod(values)
    return None


def _reshape(op: OpBuilder, x: ir.Value, sizes: list) -> ir.Value:
    """Reshape; one size may be open."""
    if sum(s is None for s in sizes) > 1:
        raise ShapeError("two products of symbolic sizes in one reshape")
    return op.reshape(x, [-1 if s is None else s for s in sizes])


@lower("MatMul")
def integer_matmul(op, a, b):
    """In double precision, which has integers of 53 bits."""
    if a.dtype.is_floating_point() or a.dtype in (ir.DataType.INT64, ir.DataType.UINT64):
        return None
    return op.Cast(op.MatMul(op.Cast(a, to=_DOUBLE), op.Cast(b, to=_DOUBLE)), to=a.dtype)


@lower("Pow")
def power_by_products(op, x, exponent):
    """A small whole exponent as products, a half as a root."""
    e = op.constant(exponent)
    if e is None or e.size != 1 or e.ndim > op.rank(x):
        return None
    number = float(e.reshape(()))
    if number == 2:
        return op.Mul(x, x)
    if number == 3:
        return op.Mul(op.Mul(x, x), x)
    if not x.dtype.is_floating_point():
        return None
    if number == 0.5:
        return op.Sqrt(x)
    return op.Div(1.0, op.Sqrt(x)) if number == -0.5 else None


@lower("Pow")
def power_same_type(op, x, exponent):
    """Before opset 12 both have the same type."""
    if x.dtype == exponent.dtype or not x.dtype.is_floating_point():
        return None
    return op.Pow(x, op.Cast(exponent, to=x.dtype))


@lower("Mod")
def mod(op, a, b, *, fmod):
    """``a - b floor(a / b)``, for integers with a positive constant divisor."""
    divisor = op.constant(b)
    if fmod or a.dtype not in (ir.DataType.INT32, ir.DataType.INT64) or divisor is None:
        return None
    if (divisor <= 0).any():
        return None
    rest = op.Sub(a, op.Mul(op.Div(a, b), b))  # the quotient is cut off towards zero
    below = op.Cast(op.Less(rest, op.const(0, a.dtype)), to=a.dtype)
    return op.Add(rest, op.Mul(below, b))


@lower("Reciprocal")
def reciprocal(op, x):
    """``1 / x``."""
    return op.Div(1.0, x)


@lower("Neg")
def neg(op, x):
    """``-1 x``."""
    return op.Mul(x, op.const(-1, x.dtype))


@lower("Sub")
def sub(op, a, b):
    """``a + (-b)``."""
    return op.Add(a, op.Neg(b))


@lower("Sqrt")
def sqrt(op, x):
    """``x^0.5``."""
    return op.Pow(x, 0.5)


@lower("Sum")
def sum_(op, *inputs):
    """One after the other."""
    y = inputs[0]
    for x in inputs[1:]:
        y = op.Add(y, x)
    return op.Identity(y) if len(inputs) == 1 else y


@lower("Mean")
def mean(op, *inputs):
    """The sum over the count."""
    return op.Mul(op.Sum(*inputs), 1.0 / len(inputs))


lower("Det")(det)
lower("DFT")(dft)


@lower(
    *(
        f"Reduce{r}"
        for r in [
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "Max",
            "Mean",
            "Min",
            "Prod",
            "Sum",
            "SumSquare",
        ]
    )
)
def reduce_no_axes(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """With ``noop_with_empty_axes`` and none given, only the elementwise part is left."""
    chosen = op.axes(axes, op.rank(x)) if axes is not None else []
    if not noop_with_empty_axes or chosen != []:
        return None
    kind = node.op_type.removeprefix("Reduce")
    if kind in ("L1", "L2"):
        return op.Abs(x)
    if kind == "LogSum":
        return op.Log(x)
    return op.Mul(x, x) if kind == "SumSquare" else op.Identity(x)


@lower("ReduceL2")
def reduce_l2(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sqrt(sum(x^2))``."""
    if noop_with_empty_axes:
        return None
    return op.Sqrt(op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims))


@lower("ReduceL1")
def reduce_l1(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(|x|)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Abs(x), axes, keepdims=keepdims)


@lower("ReduceSumSquare")
def reduce_sum_square(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x^2)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims)


@lower("ReduceLogSum")
def reduce_log_sum(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(x))``."""
    return None if noop_with_empty_axes else op.Log(op.ReduceSum(x, axes, keepdims=keepdims))


@lower("ReduceLogSumExp")
def reduce_log_sum_exp(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(exp(x - max))) + max``."""
    if noop_with_empty_axes:
        return None
    top = op.ReduceMax(x, axes, keepdims=1)
    total = op.Log(op.ReduceSum(op.Exp(op.Sub(x, top)), axes, keepdims=keepdims))
    return op.Add(total, top if keepdims else op.ReduceMax(x, axes, keepdims=0))


@lower("ReduceMean")
def reduce_mean(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x) / count``; the count has to be known."""
    chosen = op.axes(axes, op.rank(x))
    if noop_with_empty_axes or chosen is None:
        return None
    sizes = [op.dims(x)[a] for a in chosen]
    if not all(isinstance(s, int) and s for s in sizes):
        return None
    total = op.ReduceSum(x, axes, keepdims=keepdims)
    return op.Mul(total, 1.0 / float(np.prod(sizes)))


@lower("ReduceMax", "ReduceMin")
def reduce_booleans(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Any and all of booleans, as numbers."""
    if x.dtype != ir.DataType.BOOL or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=ir.DataType.BOOL)


@lower("ReduceMax", "ReduceMin")
def reduce_integers(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Small integers by way of int32, others have to be known to the target."""
    if x.dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=x.dtype)


@lower("GlobalAveragePool")
def global_average_pool(op, x):
    """The mean over all axes behind the channels."""
    return op.ReduceMean(x, list(range(2, op.rank(x))), keepdims=1)


@lower("GlobalMaxPool")
def global_max_pool(op, x):
    """The largest over all axes behind the channels."""
    return op.ReduceMax(x, list(range(2, op.rank(x))), keepdims=1)


@lower("CumSum")
def cum_sum(op, x, axis, *, exclusive, reverse):
    """Add shifted copies: after shifts by 1, 2, 4 ... each element has all before it.

    No product with a triangular matrix, in which 0 times infinity would spoil other elements.
    """
    where = op.constant(axis)
    if where is None:
        return None
    at = int(where.reshape(())) % op.rank(x)
    n = op.dims(x)[at]
    if not isinstance(n, int) or n < 1 + bool(exclusive):
        return None

    def shifted(v, k):
        kept = op.Slice(v, [k], [n], [at]) if reverse else op.Slice(v, [0], [n - k], [at])
        return op.Pad(kept, [0, k] if reverse else [k, 0], op.const(0, x.dtype), [at])

    y, k = x, 1
    while k < n:
        y = op.Add(y, shifted(y, k))
        k *= 2
    if exclusive:
        y = shifted(y, 1)
    return op.Identity(y) if y is x else y
