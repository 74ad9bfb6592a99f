"""Einsum: the gradient of a sum of products is a sum of products."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.equation import Equation, expand_equation, spare_letters


@vjp("Einsum")
def einsum(
    op: OpBuilder, dy: ir.Value, *operands: ir.Value, equation: str, node: ir.Node
) -> Gradients:
    """Move ``dy`` into the place of the operand, and the operand's term into that of the output.

    A letter that only this operand has was summed: its gradient is the same all along that axis. A
    letter that the operand repeats is a diagonal: the gradient has identity matrices as factors.
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
    spare = iter(spare_letters(*eq.terms, eq.output))
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
        dx: has, on each axis, the largest of ``sizes``.
        x: what to fit.
        sizes: for each axis, the sizes that met there. onnxruntime broadcasts a size of 1 on any
            axis, not only on those of the ellipsis.
    """
    want = op.dims(x)
    larger = [_may_exceed(axis_sizes, d) for axis_sizes, d in zip(sizes, want, strict=True)]
    smaller = [_may_fall_short(axis_sizes, d) for axis_sizes, d in zip(sizes, want, strict=True)]
    if not any(larger):
        return op.expand_like(_with_dims(dx, sizes), x) if any(smaller) else dx
    if any(smaller):
        dx = op.Expand(dx, op.shape_of(x))
    rough = [axis_sizes | {d} for axis_sizes, d in zip(sizes, want, strict=True)]
    return op.sum_to(_with_dims(dx, rough if any(smaller) else sizes), x)


def _with_dims(dx: ir.Value, sizes: Sequence[set[Dim]]) -> ir.Value:
    """Record the largest of the sizes that meet on each axis; a name of its own if that is open."""
    S.set_dims(dx, [_largest(axis_sizes, f"{dx.name}.{i}") for i, axis_sizes in enumerate(sizes)])
    return dx


def _may_exceed(axis_sizes: set[Dim], size: Dim) -> bool:
    if isinstance(size, int):
        return size == 1 and axis_sizes != {1}
    return not axis_sizes <= {size, 1}


def _may_fall_short(axis_sizes: set[Dim], size: Dim) -> bool:
    if isinstance(size, int):
        return size != 1 and not any(isinstance(d, int) and d != 1 for d in axis_sizes)
    return size not in axis_sizes


def _largest(axis_sizes: set[Dim], name: str) -> Dim:
    numbers = [d for d in axis_sizes if isinstance(d, int) and d != 1]
    if numbers:
        return numbers[0]
    names = axis_sizes - {1}
    return 1 if not names else names.pop() if len(names) == 1 else D.symbol(name)
