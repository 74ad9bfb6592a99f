"""Matrix multiplication, Einsum and determinants.

The gradient of an Einsum is an Einsum.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Gradients, vjp
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim, Equation, expand_equation, unused_letters


@vjp("MatMul")
def matmul(op: OpBuilder, dy: ir.Value, a: ir.Value, b: ir.Value) -> Gradients:
    """``da = dy @ b^T``, ``db = a^T @ dy``, summed over the broadcast batch axes."""
    if op.rank(a) == 1 and op.rank(b) == 1:
        return op.Mul(dy, b), op.Mul(dy, a)
    if op.rank(a) == 1:  # [K] @ [..., K, N] -> [..., N]
        column = op.MatMul(b, op.Unsqueeze(dy, [-1]))
        outer = op.Mul(op.Unsqueeze(a, [-1]), op.Unsqueeze(dy, [-2]))
        return _sum_to_vector(op, op.Squeeze(column, [-1]), a), outer
    if op.rank(b) == 1:  # [..., M, K] @ [K] -> [..., M]
        rows, flat = _as_matrix(op, a, op.size(b, 0)), op.Reshape(dy, [-1])
        return op.Mul(op.Unsqueeze(dy, [-1]), b), op.MatMul(flat, rows)
    if op.rank(b) == 2:
        # A weight after leading axes: one matmul over all rows, instead of one per batch and a sum.
        rows, columns = (_as_matrix(op, v, op.size(b, i)) for i, v in enumerate((a, dy)))
        da = op.Gemm(dy, b, transB=1) if op.rank(a) == 2 else op.MatMul(dy, op.mT(b))
        return da, op.Gemm(rows, columns, transA=1)
    da = op.sum_to(op.MatMul(dy, op.mT(b)), a)
    return da, op.sum_to(op.MatMul(op.mT(a), dy), b)


def _as_matrix(op: OpBuilder, x: ir.Value, width: int | ir.Value) -> ir.Value:
    """Return ``x`` with all axes but the last merged."""
    return x if op.rank(x) == 2 else op.reshape(x, [-1, width])


def _sum_to_vector(op: OpBuilder, x: ir.Value, vector: ir.Value) -> ir.Value:
    lead = op.rank(x) - 1
    return op.ReduceSum(x, list(range(lead)), keepdims=0) if lead else x


@vjp("Gemm")
def gemm(
    op: OpBuilder,
    dy: ir.Value,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> Gradients:
    """``dA = alpha dy B^T``, ``dB = alpha A^T dy``, transposed as A and B are; ``dC = beta dy``."""
    if transA:
        da = op.Gemm(b, dy, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - transA)
    if c is None:
        return da, db
    dc = op.sum_to(dy, c)
    return da, db, dc if beta == 1.0 else op.Mul(dc, beta)


@vjp("Det")
def det(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """``dX = dy * cof(X)``, where ``cof(X)[i, j]`` is the determinant of X with row i set to e_j.

    Also right for singular matrices, at the cost of n^2 determinants per matrix: the standard has
    neither an inverse nor a solver.
    """
    assert x.dtype is not None
    n = op.size(x, -1)
    eye = op.eye(n, x.dtype)
    replaced = op.Unsqueeze(op.Cast(eye, to=ir.DataType.BOOL), [1, 3])  # [i, 1, k, 1]
    rows = op.Unsqueeze(eye, [0, 2])  # [1, j, 1, l]
    variants = op.Where(replaced, rows, op.Unsqueeze(x, [-4, -3]))  # [..., i, j, k, l]
    return op.Mul(op.Unsqueeze(dy, [-2, -1]), op.Det(variants))


@vjp("Einsum")
def einsum(
    op: OpBuilder, dy: ir.Value, *operands: ir.Value, equation: str, node: ir.Node
) -> Gradients:
    """Replace the operand by ``dy``, and swap its term with that of the output.

    An index that only this operand has was summed, so its gradient is constant along that axis. An
    index that the operand repeats is a diagonal, so the gradient has identity matrices as factors.
    """
    eq = expand_equation(equation, [op.rank(x) for x in operands])
    if eq is None or len(eq.output) != op.rank(dy):
        raise UndifferentiableError(
            f"equation {equation!r} of node {node.name!r} does not fit: {S.describe(node)}"
        )
    return tuple(_gradient(op, dy, operands, eq, i) for i in range(len(operands)))


def _gradient(
    op: OpBuilder, dy: ir.Value, operands: Sequence[ir.Value], eq: Equation, index: int
) -> ir.Value:
    x = operands[index]
    assert x.dtype is not None
    terms = [eq.output, *(t for i, t in enumerate(eq.terms) if i != index)]
    values = [dy, *(v for i, v in enumerate(operands) if i != index)]
    spare = iter(unused_letters(*eq.terms, eq.output))
    target = ""
    for axis, letter in enumerate(eq.terms[index]):
        if letter in target:
            # x[i, i] is x[i, j] where i = j.
            twin = next(spare)
            terms.append(letter + twin)
            values.append(op.eye(op.size(x, axis), x.dtype))
            target += twin
        else:
            target += letter
    sizes: dict[str, set[Dim]] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, d in zip(term, op.dims(value), strict=True):
            sizes.setdefault(letter, set()).add(d)
    kept = "".join(letter for letter in target if letter in sizes)
    dx = dy if terms == [kept] else op.Einsum(*values, equation=f"{','.join(terms)}->{kept}")
    lone = [axis for axis, letter in enumerate(target) if letter not in sizes]
    dx = op.Unsqueeze(dx, lone) if lone else dx
    return _to_shape(op, dx, x, [sizes.get(letter, {1}) for letter in target])


def _to_shape(op: OpBuilder, dx: ir.Value, x: ir.Value, sizes: Sequence[set[Dim]]) -> ir.Value:
    """Return ``dx`` in the shape of ``x``: sum broadcast axes, expand summed ones.

    Args:
        op: the builder.
        dx: a gradient with the largest of ``sizes`` on each axis.
        x: the operand.
        sizes: for each axis, the sizes of all operands. onnxruntime broadcasts a size of 1 on any
            axis, not only on those of the ellipsis.
    """
    want = op.dims(x)
    larger = [_may_exceed(axis_sizes, d) for axis_sizes, d in zip(sizes, want, strict=True)]
    smaller = [_may_be_smaller(axis_sizes, d) for axis_sizes, d in zip(sizes, want, strict=True)]
    if not any(larger):
        return op.expand_like(_with_dims(dx, sizes), x) if any(smaller) else dx
    if any(smaller):
        dx = op.Expand(dx, op.shape_of(x))
    rough = [axis_sizes | {d} for axis_sizes, d in zip(sizes, want, strict=True)]
    return op.sum_to(_with_dims(dx, rough if any(smaller) else sizes), x)


def _with_dims(dx: ir.Value, sizes: Sequence[set[Dim]]) -> ir.Value:
    """Record the largest size of each axis, or a new symbol if it is unknown."""
    S.set_dims(dx, [_largest(axis_sizes, f"{dx.name}.{i}") for i, axis_sizes in enumerate(sizes)])
    return dx


def _may_exceed(axis_sizes: set[Dim], size: Dim) -> bool:
    if isinstance(size, int):
        return size == 1 and axis_sizes != {1}
    return not axis_sizes <= {size, 1}


def _may_be_smaller(axis_sizes: set[Dim], size: Dim) -> bool:
    if isinstance(size, int):
        return size != 1 and not any(isinstance(d, int) and d != 1 for d in axis_sizes)
    return size not in axis_sizes


def _largest(axis_sizes: set[Dim], name: str) -> Dim:
    numbers = [d for d in axis_sizes if isinstance(d, int) and d != 1]
    if numbers:
        return numbers[0]
    names = axis_sizes - {1}
    return 1 if not names else names.pop() if len(names) == 1 else D.symbol(name)
