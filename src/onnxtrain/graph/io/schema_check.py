"""Whether each node fits the definition of its operator: counts, required parts, attribute types.

Operators that onnx does not define are left alone: custom ones, and those that ONNX Runtime puts
into the default domain. Whether they can be used is for later stages to say.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.io.body_check import body_misfits
from onnxtrain.graph.io.limits import Kind, Problems, quote
from onnxtrain.graph.io.structure import clip

UNFIT = Kind(
    "nodes that do not fit the definition of their operator",
    "the model is not valid ONNX; export it again, or mend it with onnx_ir",
)

_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single
_AXES = frozenset({"axis", "batch_axis", "time_axis"})
_LARGEST_AXIS = 64  # runtimes cut larger numbers to 32 bits, and then they mean another axis
_FLAGS = frozenset({"keepdims"})  # runtimes disagree on what other numbers mean
_Schemas = dict[tuple[str, str], onnx.defs.OpSchema | None]


def check_nodes(model: ir.Model, problems: Problems) -> None:
    """Note every node that its schema does not allow."""
    local = set(model.functions)
    bodies = [(model.graph, model.opset_imports)]
    bodies += [(f.graph, f.opset_imports) for f in model.functions.values()]
    for root, imports in bodies:
        schemas: _Schemas = {}
        pending = [root]
        while pending:
            for node in pending.pop():
                pending += subgraphs_of(node)
                if (node.domain, node.op_type, node.overload) in local:
                    continue
                key = node.domain, node.op_type
                if key not in schemas:
                    schemas[key] = _schema(*key, imports.get(node.domain, 0))
                schema = schemas[key]
                if schema is not None and not schema.deprecated:
                    for what in (*_misfits(node, schema), *body_misfits(node)):
                        problems.add(UNFIT, f"{_label(node)}: {what}")


def _schema(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    if not onnx.defs.has(op_type, domain=domain, max_inclusive_version=version):
        return None
    return onnx.defs.get_schema(op_type, domain=domain, max_inclusive_version=version)


def _misfits(node: ir.Node, schema: onnx.defs.OpSchema) -> Iterator[str]:
    counts = (
        ("inputs", len(node.inputs), schema.min_input, schema.max_input),
        ("outputs", len(node.outputs), schema.min_output, schema.max_output),
    )
    for what, count, least, most in counts:
        if not least <= count <= most:
            allowed = f"{least}" if least == most else f"{least} to {most}"
            yield f"{count} {what}, {schema.name} has {allowed}"
    for value, formal in zip(node.inputs, schema.inputs, strict=False):
        if value is None and formal.option == _SINGLE:
            yield f"no input {formal.name}, which {schema.name} requires"
    for name, attribute in node.attributes.items():
        formal_attribute = schema.attributes.get(name)
        if formal_attribute is None:
            yield f"attribute {quote(name)}, which {schema.name} does not have"
            continue
        # The stubs of onnx do not know that this is an enum.
        expected = str(formal_attribute.type).rpartition(".")[2]
        if expected != attribute.type.name:
            yield f"attribute {quote(name)} of type {attribute.type.name}, should be {expected}"
        elif name in _AXES and not attribute.is_ref() and abs(attribute.as_int()) > _LARGEST_AXIS:
            yield f"attribute {quote(name)} is {attribute.as_int()}: no tensor has so many axes"
        elif name in _FLAGS and not attribute.is_ref() and attribute.as_int() not in (0, 1):
            yield f"attribute {quote(name)} is {attribute.as_int()}, should be 0 or 1"
    for name, formal_attribute in schema.attributes.items():
        if formal_attribute.required and name not in node.attributes:
            yield f"no attribute {quote(name)}, which {schema.name} requires"


def _label(node: ir.Node) -> str:
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"node {quote(name)} ({clip(node.op_type)})"
