"""Symbolic sizes fixed to numbers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim


def specialise(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """Replace symbolic dimensions by numbers, in place; return the model.

    Raises:
        PrepareError: if no input has a dimension of that name.
    """
    if not sizes:
        return model
    known = {s for x in model.graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    absent = [name for name in sizes if D.symbol(name) not in known]
    if absent:
        raise PrepareError(
            f"no such dimension in `dims`: {', '.join(absent)}\n"
            f"hint: the inputs have {', '.join(sorted(known)) or 'fixed sizes only'}"
        )
    bad = [f"{n}={v}" for n, v in sizes.items() if v < 1]
    if bad:
        raise PrepareError(f"sizes must be positive: {', '.join(bad)}")
    values: dict[str, Dim] = {D.symbol(n): v for n, v in sizes.items()}
    every = [*model.graph.inputs, *model.graph.outputs]
    every += [y for node in model.graph.all_nodes() for y in node.outputs]
    for x in every:
        dims = S.dims_of(x)
        if dims is not None:
            S.set_dims(x, [D.substitute(d, values) for d in dims])
    return model
