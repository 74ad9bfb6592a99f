"""One walk over a ModelProto: names, types, attributes and tensors, before any of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from onnx import AttributeProto

from onnxtrain.graph.io.external_data import DataFiles
from onnxtrain.graph.io.limits import INVALID, Kind, Limits, Problems, quote
from onnxtrain.graph.io.structure import (
    REDEFINED,
    TOO_DEEP,
    TOO_MANY_NODES,
    Graph,
    Node,
    Structure,
    clip,
    plain_domain,
)
from onnxtrain.graph.io.tensor_data import RANK, UNKNOWN_DTYPE, check_tensor, known_dtype

NOT_TEXT = Kind("text that is not UTF-8", "the file is damaged; export the model again")
LONG_NAME = Kind("names over the length limit", "load(..., limits=Limits(name_length=...))")
NO_NAME = Kind("parts of the model without a name", INVALID)
BAD_ATTRIBUTE = Kind("attributes whose value is not of their type", INVALID)
BAD_REFERENCE = Kind("attributes that refer to a parameter no function declares", INVALID)
BAD_TYPE = Kind("values of a type that cannot be used", INVALID)
MAPS = Kind(
    "values of map type, which cannot be differentiated",
    "export scikit-learn classifiers with options={'zipmap': False}",
)
SPARSE = Kind("sparse tensors, which are not supported", "store the weights as dense tensors")

_FIELD = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
_NO_VALUE = {"name", "doc_string", "type", "ref_attr_name"}
_NEEDS_VALUE = {"t", "g", "tp"}  # numbers and text may be absent: writers omit 0 and ""


class ProtoReader:
    """Reads a ModelProto into a `Structure` and notes what is wrong on the way."""

    def __init__(self, limits: Limits, problems: Problems, files: DataFiles) -> None:
        self._limits = limits
        self._problems = problems
        self._files = files
        self._nodes = 0
        self.has_device_configurations = False

    def read(self, model: onnx.ModelProto) -> Structure:
        """The wiring of ``model``; stops at once at a limit of size."""
        self._texts("the model", model, "producer_name", "producer_version", "domain")
        structure = Structure(Graph("", opsets=self._opsets(model.opset_import)))
        self._walk(model.graph, structure.graph, None)
        for function in model.functions:
            self._names("a function", function.domain, function.name, function.overload)
            key = (plain_domain(function.domain), function.name, function.overload)
            where = f"function {quote(function.name)}"
            if not function.name:
                self._problems.add(NO_NAME, "a local function")
            if key in structure.functions:
                self._problems.add(REDEFINED, f"two local functions {quote(function.name)}")
            body = Graph(f"in {where}: ", opsets=self._opsets(function.opset_import))
            structure.functions[key] = body
            body.inputs, body.outputs = list(function.input), list(function.output)
            self._names(where, *body.inputs, *body.outputs, *function.attribute)
            defaults = [self._attribute(a, where, None) for a in function.attribute_proto]
            if any(defaults):
                self._problems.add(BAD_ATTRIBUTE, f"{where}: a graph as default value")
            declared = {*function.attribute, *(a.name for a in function.attribute_proto)}
            self._walk(function, body, declared)
        return structure

    def _walk(
        self,
        root: onnx.GraphProto | onnx.FunctionProto,
        record: Graph,
        declared: set[str] | None,
    ) -> None:
        pending: list[tuple[Any, Graph, int]] = [(root, record, 0)]
        while pending:
            proto, graph, depth = pending.pop()
            self._texts(graph.where or "the graph", proto, "name")
            if isinstance(proto, onnx.GraphProto):
                self._values(proto, graph)
            else:
                for info in proto.value_info:
                    self._value_info(info, f"{graph.where}value")
            self._nodes += len(proto.node)
            if self._nodes > self._limits.nodes:
                raise self._problems.refusal(
                    TOO_MANY_NODES, f"{self._nodes} or more, the limit is {self._limits.nodes}"
                )
            for node_proto in proto.node:
                node, subgraphs = self._node(node_proto, graph, declared)
                if subgraphs and depth == self._limits.depth:
                    raise self._problems.refusal(
                        TOO_DEEP, f"{self._limits.depth} levels down: {node}"
                    )
                for name, subgraph in subgraphs:
                    child = Graph(f"in {node}, {clip(name)}: ")
                    node.subgraphs.append(child)
                    pending.append((subgraph, child, depth + 1))

    def _values(self, proto: onnx.GraphProto, graph: Graph) -> None:
        where = graph.where
        for info in proto.input:
            self._value_info(info, f"{where}input")
            graph.inputs.append(info.name)
        for info in proto.output:
            self._value_info(info, f"{where}output")
            graph.outputs.append(info.name)
        for info in proto.value_info:
            self._value_info(info, f"{where}value")
        for tensor in proto.initializer:
            label = f"{where}initializer {quote(tensor.name)}"
            self._names(f"{where}initializer", tensor.name)
            self._tensor(tensor, label)
            if not tensor.name:
                self._problems.add(NO_NAME, f"{where}an initializer")
            graph.initializers.append(tensor.name)
        for sparse in proto.sparse_initializer:
            self._problems.add(SPARSE, f"{where}initializer {quote(sparse.values.name)}")
        for annotation in proto.quantization_annotation:
            self._names(f"{where}annotation", annotation.tensor_name)
            self._metadata(f"{where}annotation", annotation.quant_parameter_tensor_names)

    def _node(
        self, proto: onnx.NodeProto, graph: Graph, declared: set[str] | None
    ) -> tuple[Node, list[tuple[str, onnx.GraphProto]]]:
        node = Node(
            proto.name,
            plain_domain(proto.domain),
            proto.op_type,
            proto.overload,
            list(proto.input),
            list(proto.output),
        )
        where = f"{graph.where}{node}"
        self._names(where, node.name, node.domain, node.op_type, node.overload)
        self._names(where, *node.inputs, *node.outputs)
        self._texts(where, proto)
        if not node.op_type:
            self._problems.add(NO_NAME, f"{where}: no operator")
        if proto.device_configurations:
            self.has_device_configurations = True
        subgraphs: list[tuple[str, onnx.GraphProto]] = []
        names = set()
        for attribute in proto.attribute:
            subgraphs += self._attribute(attribute, where, declared)
            if attribute.name in names:
                self._problems.add(REDEFINED, f"{where}: two attributes {quote(attribute.name)}")
            names.add(attribute.name)
        graph.nodes.append(node)
        return node, subgraphs

    def _attribute(
        self, proto: AttributeProto, where: str, declared: set[str] | None
    ) -> list[tuple[str, onnx.GraphProto]]:
        """Check an attribute; return its name with each graph in it, for the caller to walk."""
        self._names(where, proto.name, proto.ref_attr_name)
        self._texts(where, proto)
        where = f"{where}, attribute {quote(proto.name)}"
        if not proto.name:
            self._problems.add(NO_NAME, where)
        field = _FIELD.get(proto.type)
        if proto.ref_attr_name:
            if declared is None or proto.ref_attr_name not in declared:
                self._problems.add(BAD_REFERENCE, f"{where}: {quote(proto.ref_attr_name)}")
            return []
        present = {f.name for f, _ in proto.ListFields()} - _NO_VALUE
        if field is None or present - {field} or (field in _NEEDS_VALUE and not present):
            kind = AttributeProto.AttributeType.Name(proto.type)
            contents = f"has {', '.join(sorted(present)) or 'no value'}"
            self._problems.add(BAD_ATTRIBUTE, f"{where}: type {kind}, {contents}")
            return []
        if field in ("s", "strings"):
            for text in [proto.s] if field == "s" else proto.strings:
                if not _is_utf8(text):
                    self._problems.add(NOT_TEXT, where)
        elif field in ("t", "tensors"):
            for tensor in [proto.t] if field == "t" else proto.tensors:
                self._names(where, tensor.name)
                self._tensor(tensor, where)
        elif field in ("tp", "type_protos"):
            for type_proto in [proto.tp] if field == "tp" else proto.type_protos:
                self._type(type_proto, where)
        elif field in ("sparse_tensor", "sparse_tensors"):
            self._problems.add(SPARSE, where)
        elif field == "g":
            return [(proto.name, proto.g)]
        elif field == "graphs":
            return [(proto.name, graph) for graph in proto.graphs]
        return []

    def _tensor(self, tensor: onnx.TensorProto, where: str) -> None:
        self._texts(where, tensor)
        check_tensor(tensor, where, self._limits, self._problems, self._files)

    def _value_info(self, info: onnx.ValueInfoProto, what: str) -> None:
        self._names(what, info.name)
        self._texts(what, info)
        where = f"{what} {quote(info.name)}"
        if not info.name:
            self._problems.add(NO_NAME, f"an {what}" if what[0] in "aeiou" else f"a {what}")
        self._type(info.type, where)

    def _type(self, proto: onnx.TypeProto, where: str) -> None:
        for _ in range(self._limits.depth + 1):
            self._names(where, proto.denotation)
            which = proto.WhichOneof("value")
            if which in ("tensor_type", "sparse_tensor_type"):
                tensor = getattr(proto, which)
                if tensor.elem_type and not known_dtype(tensor.elem_type):
                    self._problems.add(UNKNOWN_DTYPE, f"{where}: data type {tensor.elem_type}")
                self._shape(tensor.shape, where)
            elif which == "map_type":
                self._problems.add(MAPS, where)
            elif which == "opaque_type":
                self._problems.add(BAD_TYPE, f"{where}: an opaque type")
            elif which in ("sequence_type", "optional_type"):
                inner = getattr(proto, which).elem_type
                kind = inner.WhichOneof("value")
                tensors = kind in ("tensor_type", "sparse_tensor_type")
                if kind is None or (tensors and not getattr(inner, kind).elem_type):
                    self._problems.add(BAD_TYPE, f"{where}: {which} without an element type")
                    return
                proto = inner
                continue
            return
        raise self._problems.refusal(TOO_DEEP, f"{where}: types nested in types")

    def _shape(self, shape: onnx.TensorShapeProto, where: str) -> None:
        if len(shape.dim) > self._limits.rank:
            self._problems.add(
                RANK, f"{where}: rank {len(shape.dim)}, the limit is {self._limits.rank}"
            )
            return
        for dim in shape.dim:
            if dim.dim_param:
                self._names(where, dim.dim_param)
            if dim.denotation:
                self._names(where, dim.denotation)

    def _opsets(self, imports: Iterable[onnx.OperatorSetIdProto]) -> list[tuple[str, int]]:
        opsets = [(entry.domain, entry.version) for entry in imports]
        self._names("opset import", *(domain for domain, _ in opsets))
        return opsets

    def _names(self, where: str, *names: str) -> None:
        for name in names:
            # protobuf hands out bytes where a string field is not UTF-8.
            if not isinstance(name, str):
                self._problems.add(NOT_TEXT, f"{where}: {quote(name)}")
            elif len(name) > self._limits.name_length:
                self._problems.add(LONG_NAME, f"{where}: {len(name)} characters, {quote(name)}")

    def _texts(self, where: str, proto: Any, *fields: str) -> None:
        for field in (*fields, "doc_string"):
            if not isinstance(getattr(proto, field), str):
                self._problems.add(NOT_TEXT, f"{where}: {field}")
        metadata: Sequence[Any] = getattr(proto, "metadata_props", ())
        if metadata:
            self._metadata(where, metadata)

    def _metadata(self, where: str, entries: Iterable[onnx.StringStringEntryProto]) -> None:
        for entry in entries:
            if not (isinstance(entry.key, str) and isinstance(entry.value, str)):
                self._problems.add(NOT_TEXT, f"{where}: metadata")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
