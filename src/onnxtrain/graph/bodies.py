"""Operators replaced by the function bodies that the ONNX standard gives for them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.protos import through_proto

# Bodies that are worse than useless: Softplus overflows above 88, Range is a Loop,
# LayerNormalization is 25 nodes of shape arithmetic.
UNUSABLE = frozenset({"LayerNormalization", "Range", "Softplus"})
_ROUNDS = 8  # bodies may use operators that have bodies


def has_body(op_type: str, opset: int) -> bool:
    """Tell whether the standard gives a usable function body for an operator."""
    schema = S.schema_of(op_type, opset)
    return (
        schema is not None
        and op_type not in UNUSABLE
        and (schema.has_function or schema.has_context_dependent_function)
    )


def inline_bodies(model: ir.Model, chosen: Callable[[str], bool]) -> ir.Model:
    """Give the model with every operator that ``chosen`` names and that has a body replaced by it."""
    opset = model.opset_imports[""]
    for _ in range(_ROUNDS):
        kinds = sorted(
            {
                n.op_type
                for n in model.graph.all_nodes()
                if n.domain in ("", "ai.onnx") and has_body(n.op_type, opset) and chosen(n.op_type)
            }
        )
        if not kinds:
            return model
        before = sum(1 for _ in model.graph.all_nodes())
        try:
            model = through_proto(
                model,
                lambda proto, kinds=kinds: onnx.inliner.inline_selected_functions(
                    proto, [("", kind) for kind in kinds], inline_schema_functions=True
                ),
            )
        except RuntimeError as error:
            raise PrepareError(
                f"the function bodies of {', '.join(kinds)} cannot be inlined: {S.first_line(error)}"
            ) from error
        if sum(1 for _ in model.graph.all_nodes()) == before:
            return model
    return model
