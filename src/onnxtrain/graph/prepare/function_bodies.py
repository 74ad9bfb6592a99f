"""Operators replaced by the function bodies that the ONNX standard gives for them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.through_proto import through_proto
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.prepare.schema_bodies import body_by_types, has_body

__all__ = ["has_body", "inline_bodies"]

_OWN = "onnxtrain.bodies"  # domain of functions that are inlined at once
_ROUNDS = 8  # bodies may use operators that have bodies


def inline_bodies(model: ir.Model, chosen: Callable[[str], bool]) -> ir.Model:
    """Return the model with the operators that ``chosen`` names replaced by their bodies."""
    opset = model.opset_imports[""]
    for _ in range(_ROUNDS):
        kinds = sorted(
            {
                n.op_type
                for n in model.graph.all_nodes()
                if is_standard(n) and has_body(n.op_type, opset) and chosen(n.op_type)
            }
        )
        if not kinds:
            return model
        before = sum(1 for _ in model.graph.all_nodes())
        try:
            model = through_proto(
                model,
                lambda proto, kinds=kinds: onnx.inliner.inline_selected_functions(
                    _with_own_bodies(proto, kinds, opset),
                    [("", kind) for kind in kinds] + [(_OWN, f.name) for f in proto.functions],
                    inline_schema_functions=True,
                ),
            )
        except RuntimeError as error:
            raise PrepareError(
                f"the function bodies of {', '.join(kinds)} cannot be inlined: "
                f"{S.first_line(error)}"
            ) from error
        model.opset_imports.pop(_OWN, None)
        if sum(1 for _ in model.graph.all_nodes()) == before:
            return model
    return model


def _with_own_bodies(proto: onnx.ModelProto, kinds: list[str], opset: int) -> onnx.ModelProto:
    """Turn nodes that leave out an input into calls of local functions, in place.

    Where a body depends on the types of the inputs, onnx's inliner asks for the type of an absent
    one too, and fails; the schema itself does not mind.
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
        function = body_by_types(node, given, opset)
        if function is None:
            continue
        function.domain, function.name = _OWN, f"{node.op_type}.{len(proto.functions)}"
        proto.functions.append(function)
        node.domain, node.op_type = function.domain, function.name
    if proto.functions and all(o.domain != _OWN for o in proto.opset_import):
        proto.opset_import.add(domain=_OWN, version=1)
    return proto
