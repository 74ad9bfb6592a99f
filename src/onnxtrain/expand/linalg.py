"""Matmul, Einsum, determinants and inverses, arithmetic, reductions and running sums."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.expand.activations import apply_activation, fast_gelu
from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.dims import expand_equation

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


@expansion("Gemm", when=LOWERING)
def gemm(op, a, b, c=None, *, alpha, beta, transA, transB):
    """``alpha a b + beta c``."""
    y = op.MatMul(op.mT(a) if transA else a, op.mT(b) if transB else b)
    y = y if alpha == 1.0 else op.Mul(y, alpha)
    if c is None:
        return y
    return op.Add(y, c if beta == 1.0 else op.Mul(c, beta))


@expansion("com.microsoft::FusedGemm", when=TRAINING)
def fused_gemm(
    op,
    a,
    b,
    c=None,
    *,
    activation="",
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    alpha=1.0,
    beta=1.0,
    transA=0,
    transB=0,
    node,
):
    """Gemm, then an activation."""
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return apply_activation(op, y, activation, given, node)


@expansion("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul", when=TRAINING)
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """``alpha * A @ B`` with transposed operands.

    With ``transBatch`` the first axis of the matrix precedes the batch axes.
    """

    def turned(x, transpose, batch):
        r = op.rank(x)
        if r < 2 or not (transpose or batch):
            return x
        perm = list(range(r))
        if batch:  # [M, batch..., K] -> [batch..., M, K]
            perm = [*range(1, r - 1), 0, r - 1]
        if transpose:
            perm[-2], perm[-1] = perm[-1], perm[-2]
        return op.Transpose(x, perm=perm)

    y = op.MatMul(turned(a, transA, transBatchA), turned(b, transB, transBatchB))
    return y if alpha == 1.0 else op.Mul(y, alpha)


@expansion("com.microsoft::FusedMatMulActivation", when=TRAINING)
def fused_matmul_activation(
    op,
    a,
    b,
    *,
    activation,
    alpha=1.0,
    transA=0,
    transB=0,
    transBatchA=0,
    transBatchB=0,
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    activation_axis=None,
    node,
):
    """``alpha * A @ B`` with transposed operands, then an activation."""
    y = fused_matmul(
        op,
        a,
        b,
        alpha=alpha,
        transA=transA,
        transB=transB,
        transBatchA=transBatchA,
        transBatchB=transBatchB,
    )
    if activation == "Softmax":
        return op.Softmax(y, axis=-1 if activation_axis is None else activation_axis)
    given = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return apply_activation(op, y, activation, given, node)


@expansion("com.microsoft::GemmFastGelu", when=TRAINING)
def gemm_fast_gelu(op, x, w, bias=None):
    """Gelu of ``x @ w + bias`` with the tanh approximation."""
    return fast_gelu(op, op.MatMul(x, w), bias)


@expansion("MatMul", when=LOWERING)
def integer_matmul(op, a, b):
    """Multiply in float64, which is exact for integers of up to 53 bits."""
    if a.dtype.is_floating_point() or a.dtype in (ir.DataType.INT64, ir.DataType.UINT64):
        return None
    return op.Cast(op.MatMul(op.Cast(a, to=_DOUBLE), op.Cast(b, to=_DOUBLE)), to=a.dtype)


@expansion("Einsum", when=LOWERING)
def einsum(op, *operands, equation):
    """Contract two operands at a time: batch letters first, then one MatMul."""
    eq = expand_equation(equation, [op.rank(x) for x in operands])
    if eq is None or any(len(set(t)) != len(t) for t in eq.terms):
        return None
    if not _sizes_agree(op, eq.terms, operands):
        return None
    y, term = operands[0], eq.terms[0]
    for i, x in enumerate(operands[1:], 1):
        later = set("".join(eq.terms[i + 1 :])) | set(eq.output)
        y, term = _contract_pair(op, y, term, x, eq.terms[i], later)
    y, term = _sum_unused(op, y, term, set(eq.output))
    if term != eq.output:
        y = op.Transpose(y, perm=[term.index(c) for c in eq.output])
    return op.Identity(y) if y is operands[0] else y


def _sizes_agree(op: OpBuilder, terms, operands) -> bool:
    """Return whether every letter has the same size in all operands, so that none broadcasts."""
    sizes: dict[str, set] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, d in zip(term, op.dims(x), strict=True):
            sizes.setdefault(letter, set()).add(d)
    return all(len(s) == 1 for s in sizes.values())


def _sum_unused(op: OpBuilder, x: ir.Value, term: str, kept: set[str]) -> tuple[ir.Value, str]:
    """Sum over the letters that neither the output nor another operand has."""
    axes = [i for i, c in enumerate(term) if c not in kept]
    if not axes:
        return x, term
    return op.ReduceSum(x, axes, keepdims=0), "".join(c for c in term if c in kept)


def _contract_pair(op: OpBuilder, a, left: str, b, right: str, later: set[str]):
    a, left = _sum_unused(op, a, left, later | set(right))
    b, right = _sum_unused(op, b, right, later | set(left))
    batch = [c for c in left if c in right and c in later]
    inner = [c for c in left if c in right and c not in later]
    rows = [c for c in left if c not in right]
    columns = [c for c in right if c not in left]
    size = {c: op.size(a, i) for i, c in enumerate(left)}
    size |= {c: op.size(b, i) for i, c in enumerate(right) if c not in size}
    if not inner:
        # An outer product: unsqueeze the letters of the other operand and multiply.
        order = [*batch, *rows, *columns]
        return op.Mul(
            _broadcast_term(op, a, left, order), _broadcast_term(op, b, right, order)
        ), "".join(order)
    a2 = _as_matrix(op, a, left, batch, rows, inner, size)
    b2 = _as_matrix(op, b, right, batch, inner, columns, size)
    y = op.MatMul(a2, b2)
    order = [*batch, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        y = _reshape_one_unknown(op, y, [size[c] for c in order])
    return y, "".join(order)


def _broadcast_term(op: OpBuilder, x: ir.Value, term: str, order: list[str]) -> ir.Value:
    kept = [c for c in order if c in term]
    if kept != list(term):
        x = op.Transpose(x, perm=[term.index(c) for c in kept])
    missing = [i for i, c in enumerate(order) if c not in term]
    return op.Unsqueeze(x, missing) if missing else x


def _as_matrix(op: OpBuilder, x: ir.Value, term: str, batch, first, second, size) -> ir.Value:
    """Transpose to [batch..., first..., second...] and merge each group into one axis."""
    order = [*batch, *first, *second]
    if order != list(term):
        x = op.Transpose(x, perm=[term.index(c) for c in order])
    if len(first) == len(second) == 1:
        return x
    sizes = [size[c] for c in batch]
    return _reshape_one_unknown(
        op, x, [*sizes, _group_size(size, first), _group_size(size, second)]
    )


def _group_size(size: dict, letters: list[str]):
    values = [size[c] for c in letters]
    if all(isinstance(v, int) for v in values):
        return math.prod(values)
    return None


def _reshape_one_unknown(op: OpBuilder, x: ir.Value, sizes: list) -> ir.Value:
    """Reshape; one size may be unknown (``None``)."""
    if sum(s is None for s in sizes) > 1:
        raise ShapeError("Einsum: two groups of symbolic sizes in one Reshape")
    return op.reshape(x, [-1 if s is None else s for s in sizes])


@expansion("Det", when=on_target(lacks="Det"))
@expansion("Det", when=LOWERING)
def det(op, x):
    """The Leibniz formula, for matrices of up to 3 rows."""
    n = op.dims(x)[-1]
    if n not in (1, 2, 3):
        return None
    r = op.rank(x)

    def at(i, j):
        row = op.Slice(x, [i], [i + 1], [r - 2])
        return op.Squeeze(op.Slice(row, [j], [j + 1], [r - 1]), [r - 2, r - 1])

    def minor(i, j, k, m):
        return op.Sub(op.Mul(at(i, k), at(j, m)), op.Mul(at(i, m), at(j, k)))

    if n == 1:
        return at(0, 0)
    if n == 2:
        return minor(0, 1, 0, 1)
    total = op.Mul(at(0, 0), minor(1, 2, 1, 2))
    total = op.Sub(total, op.Mul(at(0, 1), minor(1, 2, 0, 2)))
    return op.Add(total, op.Mul(at(0, 2), minor(1, 2, 0, 1)))


@expansion("com.microsoft::Inverse", when=TRAINING)
def inverse(op, x, *, node):
    """Gauss-Jordan elimination with partial pivoting, unrolled."""
    n = op.dims(x)[-1]
    if not isinstance(n, int) or n > 16:
        raise_unsupported(node, "only matrices of static size up to 16 x 16 can be inverted")
    dtype = x.dtype
    rows = op.const(list(range(n)))
    lead = op.rank(x) - 2
    table = op.Concat(x, op.Expand(op.eye(n, dtype), op.shape_of(x)), axis=-1)  # [..., n, 2 n]
    for i in range(n):
        column = op.Abs(op.Slice(table, [i], [i + 1], [-1]))  # [..., n, 1]
        open_ = op.Cast(op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.const(i)), to=dtype)
        best = op.ArgMax(op.Mul(op.Add(column, 1e-30), open_), axis=-2, keepdims=1)
        pivot = op.Cast(op.Equal(op.Unsqueeze(rows, [1]), best), to=dtype)  # [..., n, 1]
        here = op.Cast(op.Equal(op.Unsqueeze(rows, [1]), op.const(i)), to=dtype)
        above = op.ReduceSum(op.Mul(table, pivot), [-2], keepdims=1)
        current = op.ReduceSum(op.Mul(table, here), [-2], keepdims=1)
        same = op.Mul(pivot, here)
        swapped = op.Sub(table, op.Mul(table, op.Sub(op.Add(pivot, here), same)))
        swapped = op.Add(swapped, op.Mul(here, above))
        swapped = op.Add(swapped, op.Mul(op.Sub(pivot, same), current))
        leading = op.Div(above, op.Slice(above, [i], [i + 1], [-1]))
        factor = op.Mul(op.Slice(swapped, [i], [i + 1], [-1]), op.Sub(1.0, here))
        cleared = op.Sub(swapped, op.Mul(factor, leading))
        table = op.Add(op.Mul(cleared, op.Sub(1.0, here)), op.Mul(leading, here))
    y = op.Slice(table, [n], [2 * n], [lead + 1])
    y.shape = x.shape
    return y


@expansion("com.microsoft::CDist", when=TRAINING)
def c_dist(op, a, b, *, metric="sqeuclidean", node):
    """Pairwise distances of rows: ``sum((a - b)^2)`` or its square root."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise_unsupported(
            node, f"unknown metric {metric!r} (expected one of sqeuclidean, euclidean)"
        )
    difference = op.Sub(op.Unsqueeze(a, [1]), op.Unsqueeze(b, [0]))
    squares = op.ReduceSum(op.Mul(difference, difference), [2], keepdims=0)
    return op.Sqrt(squares) if metric == "euclidean" else squares


@expansion("Pow", when=LOWERING)
def power_by_products(op, x, exponent):
    """Small integer exponents by Mul, exponents of 1/2 and -1/2 by Sqrt."""
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


@expansion("Pow", when=LOWERING)
def power_same_type(op, x, exponent):
    """Cast the exponent: before opset 12 both operands have the same type."""
    if x.dtype == exponent.dtype or not x.dtype.is_floating_point():
        return None
    return op.Pow(x, op.Cast(exponent, to=x.dtype))


@expansion("Mod", when=LOWERING)
def mod(op, a, b, *, fmod):
    """``a - b * floor(a / b)``, for integers with a positive constant divisor."""
    divisor = op.constant(b)
    if fmod or a.dtype not in (ir.DataType.INT32, ir.DataType.INT64) or divisor is None:
        return None
    if (divisor <= 0).any():
        return None
    rest = op.Sub(a, op.Mul(op.Div(a, b), b))  # integer Div truncates towards zero
    below = op.Cast(op.Less(rest, op.const(0, a.dtype)), to=a.dtype)
    return op.Add(rest, op.Mul(below, b))


@expansion("Reciprocal", when=LOWERING)
def reciprocal(op, x):
    """``1 / x``."""
    return op.Div(1.0, x)


@expansion("Neg", when=LOWERING)
def neg(op, x):
    """``-1 x``."""
    return op.Mul(x, op.const(-1, x.dtype))


@expansion("Sub", when=LOWERING)
def sub(op, a, b):
    """``a + (-b)``."""
    return op.Add(a, op.Neg(b))


@expansion("Sqrt", when=LOWERING)
def sqrt(op, x):
    """``x^0.5``."""
    return op.Pow(x, 0.5)


@expansion("Sum", when=LOWERING)
def sum_(op, *inputs):
    """A chain of Add."""
    y = inputs[0]
    for x in inputs[1:]:
        y = op.Add(y, x)
    return op.Identity(y) if len(inputs) == 1 else y


@expansion("Mean", when=LOWERING)
def mean(op, *inputs):
    """``Sum(inputs) / n``."""
    return op.Mul(op.Sum(*inputs), 1.0 / len(inputs))


@expansion("com.microsoft::BiasAdd", when=TRAINING)
def bias_add(op, x, bias, skip):
    """``x + bias + skip``."""
    return op.Add(op.Add(x, bias), skip)


@expansion("com.microsoft::GatedAdd", when=TRAINING)
def gated_add(op, x, y, gate):
    """``x + y * gate``, with a gate per row."""
    return op.Add(x, op.Mul(y, gate))


@expansion("com.microsoft::Affine", when=TRAINING)
def affine(op, x, *, alpha=1.0, beta=0.0):
    """``alpha * x + beta``."""
    return op.Add(op.Mul(x, alpha), beta)


@expansion("com.microsoft::Scale", when=TRAINING)
def contrib_scale(op, x, *, scale=1.0):
    """``scale * x``."""
    return op.Mul(x, scale)


@expansion(
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
    ),
    when=LOWERING,
)
def reduce_no_axes(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """With ``noop_with_empty_axes`` and no axes, only the elementwise part remains."""
    chosen = op.axes(axes, op.rank(x)) if axes is not None else []
    if not noop_with_empty_axes or chosen != []:
        return None
    kind = node.op_type.removeprefix("Reduce")
    if kind in ("L1", "L2"):
        return op.Abs(x)
    if kind == "LogSum":
        return op.Log(x)
    return op.Mul(x, x) if kind == "SumSquare" else op.Identity(x)


@expansion("ReduceL2", when=LOWERING)
def reduce_l2(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sqrt(sum(x^2))``."""
    if noop_with_empty_axes:
        return None
    return op.Sqrt(op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims))


@expansion("ReduceL1", when=LOWERING)
def reduce_l1(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(|x|)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Abs(x), axes, keepdims=keepdims)


@expansion("ReduceSumSquare", when=LOWERING)
def reduce_sum_square(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x^2)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims)


@expansion("ReduceLogSum", when=LOWERING)
def reduce_log_sum(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(x))``."""
    return None if noop_with_empty_axes else op.Log(op.ReduceSum(x, axes, keepdims=keepdims))


@expansion("ReduceLogSumExp", when=LOWERING)
def reduce_log_sum_exp(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(exp(x - max))) + max``."""
    if noop_with_empty_axes:
        return None
    top = op.ReduceMax(x, axes, keepdims=1)
    total = op.Log(op.ReduceSum(op.Exp(op.Sub(x, top)), axes, keepdims=keepdims))
    return op.Add(total, top if keepdims else op.ReduceMax(x, axes, keepdims=0))


@expansion("ReduceMean", when=LOWERING)
def reduce_mean(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x) / count``, for static sizes."""
    chosen = op.axes(axes, op.rank(x))
    if noop_with_empty_axes or chosen is None:
        return None
    sizes = [op.dims(x)[a] for a in chosen]
    if not all(isinstance(s, int) and s for s in sizes):
        return None
    total = op.ReduceSum(x, axes, keepdims=keepdims)
    return op.Mul(total, 1.0 / float(np.prod(sizes)))


@expansion("ReduceMax", "ReduceMin", when=LOWERING)
def reduce_booleans(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Reduce booleans in int32."""
    if x.dtype != ir.DataType.BOOL or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=ir.DataType.BOOL)


@expansion("ReduceMax", "ReduceMin", when=LOWERING)
def reduce_integers(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Reduce int8 and uint8 in int32."""
    if x.dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=x.dtype)


@expansion("CumSum", when=LOWERING)
def cum_sum(op, x, axis, *, exclusive, reverse):
    """Add shifted copies: after shifts by 1, 2, 4, ... each element is the sum up to it.

    Not a matmul with a triangular matrix: 0 times infinity would spread NaN to other elements.
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


@expansion("CumProd", when=TRAINING)
def cum_prod(op, x, axis, *, exclusive=0, reverse=0):
    """A Scan over a constant axis that multiplies."""
    where = op.constant(axis)
    if where is None:
        return None
    at = int(where.reshape(-1)[0]) % op.rank(x)
    first = op.ReduceProd(op.Slice(x, [0], [0], [at]), [at], keepdims=0)  # ones: an empty product
    body = op.body([first, first])
    so_far, here = body.graph.inputs
    product = body.Mul(so_far, here)
    body.graph.outputs.extend([product, body.Identity(so_far if exclusive else product)])
    _, y = op.Scan(
        first,
        x,
        body=body.graph,
        num_scan_inputs=1,
        scan_input_axes=[at],
        scan_output_axes=[at],
        scan_input_directions=[reverse],
        scan_output_directions=[reverse],
        _outputs=2,
    )
    y.shape = x.shape
    return y
