"""A case at some opset."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.lowering.destination import NEWEST, OLDEST, Destination
from onnxtrain.lowering.forms import UnfitError, apply_forms
from onnxtrain.lowering.probe.case import Case, model_of

_LAST = onnx.defs.onnx_opset_version()


def _since(op: str, opset: int) -> int:
    schema = S.schema_of(op, opset)
    return 0 if schema is None else schema.since_version


def versions(case: Case, opsets: list[int]) -> list[int]:
    """Return the opsets, newest first, at which the operator differs from the next one's."""
    oldest: dict[int, int] = {}
    for opset in sorted(opsets, reverse=True):
        schema = S.schema_of(case.op, min(opset, case.opset))
        if schema is not None and not schema.deprecated:
            oldest[schema.since_version] = opset  # the oldest opset of each version
    return list(oldest.values())


def case_at(case: Case, opset: int) -> onnx.ModelProto | None:
    """Return the model at an opset, ``None`` if it is not one node there."""
    if case.op == "Dropout" and len(case.outputs) > 1 and opset < 12:
        return None  # what the mask is where nothing is dropped is not specified there
    model = model_of(case)
    try:
        if _since(case.op, case.opset) == _since(case.op, opset):
            model.opset_imports[""] = opset
        elif opset < case.opset and _since(case.op, case.opset) == _since(case.op, _LAST):
            apply_forms(model, opset)  # knows the way down from the newest version only
        else:
            return None
    except (UnfitError, AssertionError):
        return None
    remove_dead(model)
    if len(model.graph) != 1:
        return None
    target = Destination(opset, opset)
    model.ir_version = target.ir_version
    if target.initializers_as_inputs:
        listed = set(model.graph.inputs)
        model.graph.inputs.extend(x for x in model.graph.initializers.values() if x not in listed)
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    return proto


__all__ = ["NEWEST", "OLDEST", "case_at", "versions"]
