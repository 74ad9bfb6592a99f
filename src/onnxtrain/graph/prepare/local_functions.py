"""Local functions inlined where they are called."""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.through_proto import through_proto


def inline_functions(model: ir.Model) -> ir.Model:
    """Return the model without local functions; the argument must not be used any more.

    Those of another opset than the model's are brought to it first.

    Raises:
        PrepareError: if that cannot be done, or if it is not clear what a function's name means.
    """
    _refuse_names_of_the_standard(model)
    try:
        work = model.clone()
        passes.InlinePass()(work)
    except (*S.UNFIT, RuntimeError, ir.passes.InvariantError) as error:
        return _by_onnx(model, error)
    work.meta.update(model.meta)
    return work


def _refuse_names_of_the_standard(model: ir.Model) -> None:
    """Refuse functions called like an operator of the standard: runtimes run the operator."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    taken = sorted(
        f.name
        for f in model.functions.values()
        if f.domain in ("", "ai.onnx") and S.schema_of(f.name, opset) is not None
    )
    if taken:
        raise PrepareError(
            f"local functions with names of standard operators: {', '.join(taken)}\n"
            "  ONNX means the function, onnxruntime runs the operator\n"
            "hint: give the functions another domain, or leave them out if they do the same"
        )


def _by_onnx(model: ir.Model, first: Exception) -> ir.Model:
    names = ", ".join(sorted({f"{f.domain}::{f.name}" for f in model.functions.values()})[:5])
    try:
        inlined = through_proto(
            model, lambda proto: onnx.inliner.inline_local_functions(proto, convert_version=True)
        )
    except (*S.UNFIT, RuntimeError, onnx.checker.ValidationError) as error:
        raise PrepareError(
            f"the local functions cannot be inlined: {names}\n"
            f"  {S.first_line(first)}\n  {S.first_line(error)}\n"
            "hint: export the model without functions, or with one opset throughout"
        ) from error
    if inlined.functions:
        raise PrepareError(
            f"the local functions cannot be inlined: {names}\n  {S.first_line(first)}\n"
            "hint: export the model without functions, or with one opset throughout"
        )
    return inlined
