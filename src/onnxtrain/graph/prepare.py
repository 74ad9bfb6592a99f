"""The normal form that every later stage may assume."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.graph.infer import infer_shapes

OPSET = 21
IR_VERSION = 10


_CONSTANTS = "onnxtrain.constants"  # key in Model.meta: initializers that were nodes of the file


def constant_names(model: ir.Model) -> set[str]:
    """Give the names of initializers that are constants of the graph, not parameters."""
    return set(model.meta.get(_CONSTANTS, ()))


def prepare(model: ir.Model) -> ir.Model:
    """Bring a model to the normal form, in place, and give it back."""
    passes.InlinePass()(model)
    parameters = set(model.graph.initializers)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    model.meta[_CONSTANTS] = sorted(set(model.graph.initializers) - parameters)
    model.ir_version = IR_VERSION
    infer_shapes(model.graph, model.graph.opset_imports[""])
    return model
