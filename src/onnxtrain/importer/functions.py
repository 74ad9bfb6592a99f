"""Inline local functions of a model and function bodies of the ONNX standard.

``inline_functions`` inlines functions that the file defines. ``inline_bodies`` replaces operators
by the body that the standard defines for them; some bodies depend on the types of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.writer import transform_proto
from onnxtrain.graph.nodes import is_standard


def inline_functions(model: ir.Model) -> ir.Model:
    """Return the model without local functions; the argument must not be used any more.

    Functions with another opset than the model are converted to it first.

    Raises:
        PrepareError: the conversion fails, or a function has the name of a standard operator.
    """
    _reject_standard_names(model)
    try:
        work = model.clone()
        passes.InlinePass()(work)
    except (*S.INVALID_NODE_ERRORS, RuntimeError, ir.passes.InvariantError) as error:
        return _inline_with_onnx(model, error)
    return work


def _reject_standard_names(model: ir.Model) -> None:
    """Reject functions named like a standard operator, because runtimes run the operator."""
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
            "hint: move the functions to another domain, or remove them if they are equivalent"
        )


def _inline_with_onnx(model: ir.Model, first: Exception) -> ir.Model:
    names = ", ".join(sorted({f"{f.domain}::{f.name}" for f in model.functions.values()})[:5])
    try:
        inlined = transform_proto(
            model, lambda proto: onnx.inliner.inline_local_functions(proto, convert_version=True)
        )
    except (*S.INVALID_NODE_ERRORS, RuntimeError, onnx.checker.ValidationError) as error:
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


# The body of Softplus overflows above 88, that of Range is a Loop, and that of LayerNormalization
# has 25 nodes of shape arithmetic. All three have a gradient rule or a better expansion.
UNUSABLE_BODIES = frozenset({"LayerNormalization", "Range", "Softplus"})


class _Schema(Protocol):
    """Members of ``OpSchema`` that the type stubs of onnx lack."""

    @property
    def has_function(self) -> bool: ...
    @property
    def has_context_dependent_function(self) -> bool: ...
    @property
    def context_dependent_function_opset_versions(self) -> list[int]: ...
    def get_context_dependent_function_with_opset_version(
        self, opset: int, node: bytes, types: list[bytes], /
    ) -> bytes: ...


def has_body(op_type: str, opset: int, domain: str = "") -> bool:
    """Return whether the standard has a usable function body for an operator."""
    schema = S.schema_of(op_type, opset, domain)
    if schema is None or op_type in UNUSABLE_BODIES:
        return False
    full = cast(_Schema, schema)
    return full.has_function or full.has_context_dependent_function


def context_dependent_body(
    node: onnx.NodeProto, types: Sequence[onnx.TypeProto], opset: int
) -> onnx.FunctionProto | None:
    """Return the function body for the input types of a node, ``None`` if it has none.

    Default attributes are written into ``node``, because the body reads them there.
    """
    schema = S.schema_of(node.op_type, opset)
    if schema is None:
        return None
    full = cast(_Schema, schema)
    versions = [v for v in full.context_dependent_function_opset_versions if v <= opset]
    if not full.has_context_dependent_function or not versions:
        return None
    given = {a.name for a in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)
    text = full.get_context_dependent_function_with_opset_version(
        max(versions), node.SerializeToString(), [t.SerializeToString() for t in types]
    )
    return onnx.FunctionProto.FromString(text)


PREVIEW_DOMAIN = "ai.onnx.preview"
"""Operators that may still change; no runtime has kernels for them."""
_BODY_DOMAIN = "onnxtrain.bodies"  # domain of temporary functions, inlined immediately
_MAX_ROUNDS = 8  # bodies may use operators that have bodies


def inline_preview(model: ir.Model) -> ir.Model:
    """Return the model with operators of ``ai.onnx.preview`` replaced by their bodies.

    Their inputs must be typed: the bodies depend on the types.

    Raises:
        PrepareError: onnx cannot inline a body.
    """
    kinds = sorted({n.op_type for n in model.graph.all_nodes() if n.domain == PREVIEW_DOMAIN})
    if not kinds:
        return model
    keys = [(PREVIEW_DOMAIN, kind) for kind in kinds]
    try:
        return transform_proto(
            model,
            lambda proto: onnx.inliner.inline_selected_functions(
                proto, keys, inline_schema_functions=True
            ),
        )
    except RuntimeError as error:
        raise PrepareError(
            f"the function bodies of {', '.join(kinds)} cannot be inlined: {S.first_line(error)}"
        ) from error


def inline_bodies(model: ir.Model, selected: Callable[[str], bool]) -> ir.Model:
    """Return the model with operators that ``selected`` accepts replaced by their bodies."""
    opset = model.opset_imports[""]
    for _ in range(_MAX_ROUNDS):
        kinds = sorted(
            {
                n.op_type
                for n in model.graph.all_nodes()
                if is_standard(n) and has_body(n.op_type, opset) and selected(n.op_type)
            }
        )
        if not kinds:
            return model
        before = sum(1 for _ in model.graph.all_nodes())
        try:
            model = transform_proto(
                model,
                lambda proto, kinds=kinds: onnx.inliner.inline_selected_functions(
                    _call_local_functions(proto, kinds, opset),
                    [("", kind) for kind in kinds]
                    + [(_BODY_DOMAIN, f.name) for f in proto.functions],
                    inline_schema_functions=True,
                ),
            )
        except RuntimeError as error:
            raise PrepareError(
                f"the function bodies of {', '.join(kinds)} cannot be inlined: "
                f"{S.first_line(error)}"
            ) from error
        model.opset_imports.pop(_BODY_DOMAIN, None)
        if sum(1 for _ in model.graph.all_nodes()) == before:
            return model
    return model


def _call_local_functions(proto: onnx.ModelProto, kinds: list[str], opset: int) -> onnx.ModelProto:
    """Replace nodes with an omitted input by calls of local functions, in place.

    For bodies that depend on input types, the inliner of onnx also requires the type of an omitted
    input, and fails. The schema itself accepts it.
    """
    values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    types = {v.name: v.type for v in values}
    for tensor in proto.graph.initializer:
        types[tensor.name] = onnx.TypeProto(
            tensor_type=onnx.TypeProto.Tensor(elem_type=tensor.data_type)
        )
    for node in proto.graph.node:
        if node.op_type not in kinds or not is_standard(node) or all(node.input):
            continue
        given = [types.get(name, onnx.TypeProto()) for name in node.input]
        function = context_dependent_body(node, given, opset)
        if function is None:
            continue
        function.domain, function.name = _BODY_DOMAIN, f"{node.op_type}.{len(proto.functions)}"
        proto.functions.append(function)
        node.domain, node.op_type = function.domain, function.name
    if proto.functions and all(o.domain != _BODY_DOMAIN for o in proto.opset_import):
        proto.opset_import.add(domain=_BODY_DOMAIN, version=1)
    return proto
