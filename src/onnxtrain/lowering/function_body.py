"""The standard's function body as a lowering, the last to be tried."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.prepare.schema_bodies import body_by_types, has_body


def body_of(op: OpBuilder, *inputs: ir.Value | None, node: ir.Node) -> list[ir.Value | None] | None:
    """Return the outputs of the function body that the standard has for a node, if any."""
    if not is_standard(node) or not has_body(node.op_type, op.opset):
        return None
    function = _function(op, node)
    if function is None:
        return None
    attributes = {
        name: attribute for name, attribute in node.attributes.items() if not attribute.is_ref()
    }
    schema = S.schema_of(node.op_type, op.opset)
    assert schema is not None
    for name, formal in schema.attributes.items():
        if name not in attributes and formal.default_value.type:
            attributes[name] = ir.serde.deserialize_attribute(formal.default_value)
    values: dict[str, ir.Value | None] = {"": None}
    values |= dict.fromkeys(function.input)
    values |= dict(zip(function.input, inputs, strict=False))
    for proto in function.node:
        if any(a.HasField("g") or a.graphs for a in proto.attribute):
            return None  # a body with control flow is worse than a refusal
        given = []
        for a in proto.attribute:
            if not a.ref_attr_name:
                given.append(ir.serde.deserialize_attribute(a))
            elif a.ref_attr_name in attributes:
                source = attributes[a.ref_attr_name]
                given.append(ir.Attr(a.name, source.type, source.value))
        outputs = _emit(op, proto, [values[name] for name in proto.input], given)
        values |= dict(zip(proto.output, outputs, strict=True))
    return [values.get(name) for name in function.output]


def _emit(
    op: OpBuilder, proto: onnx.NodeProto, inputs: list[ir.Value | None], given: list[ir.Attr]
) -> list[ir.Value]:
    by_name: dict[str, Any] = {a.name: a.value for a in given}
    if proto.op_type == "Constant":
        (value,) = by_name.values()
        if isinstance(value, ir.TensorProtocol):
            return [op.const(value.numpy(), value.dtype)]
        return [op.const(list(value) if isinstance(value, tuple) else value)]
    while inputs and inputs[-1] is None:
        inputs.pop()
    node = ir.Node(
        "", proto.op_type, inputs, given, num_outputs=len(proto.output), version=op.opset
    )
    outputs = op.append(node)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _function(op: OpBuilder, node: ir.Node) -> onnx.FunctionProto | None:
    schema: Any = S.schema_of(node.op_type, op.opset)  # onnx's stubs lack these members
    assert schema is not None
    if not schema.has_context_dependent_function:
        return schema.function_body
    types = []
    for x in node.inputs:
        kind = onnx.TypeProto() if x is None or x.type is None else ir.serde.serialize_type(x.type)
        if x is not None and x.shape is not None:
            ir.serde.serialize_shape_into(kind, x.shape)
        types.append(kind)
    return body_by_types(ir.serde.serialize_node(node), types, op.opset)
