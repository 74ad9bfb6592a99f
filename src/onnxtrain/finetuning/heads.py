"""The last layer of a classifier: made for other classes, and trained beside adapters."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import load
from onnxtrain.replace_head import replace_head


def with_head(model: ir.Model, output: str, classes: int, *, seed: int) -> tuple[ir.Model, str]:
    """Return the model with one output, a score per class, and a note if its last layer is new.

    Args:
        model: has the output; it may be changed.
        output: its name.
        classes: how many there are.
        seed: of the weights of a new layer.
    """
    scores = next(y for y in model.graph.outputs if y.name == output)
    dims, note = S.dims_of(scores) or (), ""
    if dims[-1:] != (classes,):
        known = dims[-1] if dims else "an unknown number"
        note = f"the last layer is new: {classes} classes, not {known}"
        model = load(replace_head(model, output, classes, seed=seed))
    model.graph.outputs[:] = [y for y in model.graph.outputs if y.name == output]
    return model, note


def head_weights(model: ir.Model) -> tuple[str, ...]:
    """Return the weights of the last layer."""
    value = model.graph.outputs[0]
    while (node := value.producer()) is not None:
        weights = [x.name or "" for x in node.inputs if x is not None and x.is_initializer()]
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            return tuple(weights)
        if node.op_type == "Add" and weights:
            inner = next(x for x in node.inputs if x is not None and not x.is_initializer())
            product = inner.producer()
            if product is not None and product.op_type == "MatMul":
                more = [
                    x.name or "" for x in product.inputs if x is not None and x.is_initializer()
                ]
                return (*more, *weights)
        first = node.inputs[0] if node.inputs else None
        if first is None:
            break
        value = first
    return ()


__all__ = ["head_weights", "with_head"]
