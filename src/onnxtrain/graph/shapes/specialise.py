"""Symbolic sizes fixed to numbers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.open_sizes import open_sizes


def specialise(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """Replace symbolic dimensions by numbers, in place; return the model.

    A size is named as in the file, or by its place: ``"x[0]"`` is the first of the input ``x``.

    Raises:
        PrepareError: if no input has such a dimension.
    """
    if not sizes:
        return model
    bad = [f"{n}={v}" for n, v in sizes.items() if v < 1]
    if bad:
        raise PrepareError(f"sizes must be positive: {', '.join(bad)}")
    known = {s for x in model.graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    values: dict[str, Dim] = {}
    absent = []
    for name, size in sizes.items():
        if D.symbol(name) in known:
            values[D.symbol(name)] = size
        elif not _at_place(model.graph, name, size, values):
            absent.append(name)
    if absent:
        raise PrepareError(
            f"no such dimension in `dims`: {', '.join(absent)}\n"
            f"hint: the inputs have {', '.join(open_sizes(model.graph)) or 'fixed sizes only'}"
        )
    every = [*model.graph.inputs, *model.graph.outputs]
    every += [y for node in model.graph.all_nodes() for y in node.outputs]
    for x in every:
        dims = S.dims_of(x)
        if dims is not None:
            S.set_dims(x, [D.substitute(d, values) for d in dims])
    return model


def _at_place(graph: ir.Graph, place: str, size: int, values: dict[str, Dim]) -> bool:
    """Fix the dimension at ``x[0]``; return whether there is one that is open, or of that size."""
    name, bracket, rest = place.rpartition("[")
    x = next((x for x in graph.inputs if x.name == name), None)
    dims = None if x is None else S.dims_of(x)
    if not bracket or x is None or dims is None or not rest.removesuffix("]").isdecimal():
        return False
    axis = int(rest.removesuffix("]"))
    if axis >= len(dims) or (isinstance(dims[axis], int) and dims[axis] != size):
        return False
    d = dims[axis]
    if isinstance(d, str) and d.isidentifier():
        values[d] = size
    else:
        S.set_dims(x, [size if i == axis else d for i, d in enumerate(dims)])
    return True
