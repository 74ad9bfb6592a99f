"""The passes of lowering, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import LoweringError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.through_proto import REFUSALS, through_proto
from onnxtrain.graph.prepare import constant_names, prepare
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.infer import infer_shapes
from onnxtrain.graph.shapes.specialise import specialise
from onnxtrain.graph.simplify import remove_dead, simplify
from onnxtrain.lowering.destination import NEWEST, OLDEST, Destination
from onnxtrain.lowering.fold_constants import drop_inference_no_ops, fold_constants
from onnxtrain.lowering.forms import apply_forms
from onnxtrain.lowering.profile import Profile
from onnxtrain.lowering.replace import replace_unsupported


def lower_model(
    model: ir.Model, opset: int, profile: Profile | None, sizes: Mapping[str, int]
) -> tuple[ir.Model, Counter[str]]:
    """Return a loaded model at an opset, in the operators of a profile, and what was replaced.

    Args:
        model: from ``load``; must not be used any more.
        opset: of the result.
        profile: what the runtime knows; ``None`` stands for everything the opset has.
        sizes: numbers for symbolic sizes.
    """
    _check_opset(opset, profile)
    given = _names_of_weights(model)
    model = prepare(specialise(model, sizes), by_readers=False)
    weights = given - constant_names(model)
    working = model.opset_imports[""]
    _tidy(model, weights)
    symbols = {s for x in model.graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    target = Destination(opset, working, profile, sorted(symbols))
    replaced = replace_unsupported(model, target, weights)
    if replaced:
        # Folding may leave what a rule made for the general case in a plainer form.
        _tidy(model, weights)
        replaced += replace_unsupported(model, target, weights)
        remove_dead(model)
    if opset <= working:
        apply_forms(model, opset)
    else:
        model = _raise(model, opset)
    remove_dead(model)
    _stamp(model, target)
    return model, replaced


def _tidy(model: ir.Model, weights: frozenset[str]) -> None:
    drop_inference_no_ops(model)
    fold_constants(model, weights)
    remove_dead(model)
    infer_shapes(model.graph, model.opset_imports[""])
    fold_constants(model, weights)
    drop_inference_no_ops(model)
    simplify(model)


def _names_of_weights(model: ir.Model) -> frozenset[str]:
    return frozenset(n for n, x in model.graph.initializers.items() if S.is_float(x))


def _check_opset(opset: int, profile: Profile | None) -> None:
    if not OLDEST <= opset <= NEWEST:
        raise LoweringError(f"no such opset: {opset}\nhint: one of {OLDEST} to {NEWEST}")
    if profile is not None and not profile.opset[0] <= opset <= profile.opset[1]:
        low, high = profile.opset
        raise LoweringError(
            f"{profile.name} does not read opset {opset}\nhint: one of {low} to {high}"
        )


def _raise(model: ir.Model, opset: int) -> ir.Model:
    try:
        return through_proto(model, lambda p: onnx.version_converter.convert_version(p, opset))
    except REFUSALS as error:
        raise LoweringError(
            f"the model cannot be raised to opset {opset}: {S.first_line(error)}"
        ) from error


def _stamp(model: ir.Model, target: Destination) -> None:
    model.ir_version = target.ir_version
    graph = model.graph
    if target.initializers_as_inputs:
        listed = set(graph.inputs)
        graph.inputs.extend(x for x in graph.initializers.values() if x not in listed)
    for x in graph.initializers.values():
        if x.const_value is not None and x.shape is None:
            x.shape, x.type = (
                ir.Shape(x.const_value.shape.numpy()),
                ir.TensorType(x.const_value.dtype),
            )
