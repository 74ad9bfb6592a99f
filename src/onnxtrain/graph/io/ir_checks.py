"""Check in-memory onnx_ir models, then normalize and check every loaded model.

:func:`read_structure` checks a model of the caller like
:class:`~onnxtrain.graph.io.proto_checks.ProtoReader` checks a protobuf. :func:`normalize_loaded`
and :func:`check_nodes` run on all loaded models: the first makes the model own its tensors and
normalizes it, the second compares each node with its operator's schema. Operators that onnx does
not define are not checked here; later stages report the ones they do not support.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping

import onnx
import onnx_ir as ir

from onnxtrain.graph.io.external_data import NO_DIRECTORY, DataFiles, ExternalDataError
from onnxtrain.graph.io.limits import INVALID, Limits, ProblemKind, Problems, quote
from onnxtrain.graph.io.proto_checks import (
    BAD_ATTRIBUTE,
    DANGLING,
    LONG_NAME,
    NO_NAME,
    TOO_DEEP,
    TOO_MANY_NODES,
    Graph,
    Node,
    Structure,
    body_errors,
    check_dims,
    check_tensor,
    escape_name,
    to_owned_tensor,
)
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN, record_load_repair

NO_DATA = ProblemKind("initializers without data", "set the const_value of each initializer")
NO_TYPE = ProblemKind(
    "graph inputs without a type", "the model is not valid ONNX; set the types of its inputs"
)
CONTRADICTION = ProblemKind(
    "initializers that do not match their declared type",
    INVALID,
)

Files = Mapping[str, DataFiles]  # by base directory


class DirectoryFiles(dict[str, DataFiles]):
    """`DataFiles` by base directory, created on first use."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    def __missing__(self, directory: str) -> DataFiles:
        # Without a base directory ExternalTensor skips its own checks, so DataFiles(None) rejects
        # such tensors.
        path = os.path.abspath(directory) if directory else None
        self[directory] = DataFiles(path, self._limits)
        return self[directory]


def read_structure(model: ir.Model, limits: Limits, problems: Problems, files: Files) -> Structure:
    """Return the structure of a model; raise an error immediately at a size limit."""
    reader = _Reader(limits, problems, files)
    structure = Structure(Graph("", opsets=list(model.opset_imports.items())))
    reader.walk(model.graph, structure.graph)
    for key, function in model.functions.items():
        body = Graph(
            f"in function {quote(function.name)}: ", opsets=list(function.opset_imports.items())
        )
        structure.functions[key] = body
        if list(reader.attributes(function.attributes, body.where)):
            problems.add(BAD_ATTRIBUTE, f"{body.where}a graph as default value")
        reader.walk(function.graph, body)
    return structure


class _Reader:
    def __init__(self, limits: Limits, problems: Problems, files: Files) -> None:
        self._limits = limits
        self._problems = problems
        self._files = files
        self._nodes = 0

    def walk(self, root: ir.Graph, record: Graph) -> None:
        pending: list[tuple[ir.Graph, Graph, int]] = [(root, record, 0)]
        defined: set[ir.Value] = set()
        used: list[tuple[str, ir.Value, Node]] = []
        while pending:
            graph, record, depth = pending.pop()
            defined.update(graph.inputs, graph.initializers.values())
            record.inputs = [self._name(v, f"{record.where}input") for v in graph.inputs]
            for value in graph.initializers.values():
                record.initializers.append(self._name(value, f"{record.where}initializer"))
                self._initializer(value, record.where)
            self._nodes += len(graph)
            if self._nodes > self._limits.nodes:
                raise self._problems.refusal(
                    TOO_MANY_NODES, f"{self._nodes} or more, the limit is {self._limits.nodes}"
                )
            for ir_node in graph:
                node = self._node(ir_node, record)
                defined.update(ir_node.outputs)
                used += [(record.where, v, node) for v in ir_node.inputs if v is not None]
                where = f"{record.where}{node}"
                for name, subgraph in self.attributes(ir_node.attributes, where):
                    if depth == self._limits.depth:
                        detail = f"{self._limits.depth} levels down: {node}"
                        raise self._problems.refusal(TOO_DEEP, detail)
                    child = Graph(f"in {node}, {escape_name(name)}: ")
                    node.subgraphs.append(child)
                    pending.append((subgraph, child, depth + 1))
            record.outputs = [self._name(v, f"{record.where}output") for v in graph.outputs]
        # check_structure compares names only: a node may read a value of another model whose name
        # also exists here.
        for where, value, node in used:
            if value not in defined:
                self._problems.add(DANGLING, f"{where}{quote(value.name)} of {node}")

    def _node(self, node: ir.Node, record: Graph) -> Node:
        where = f"{record.where}a node ({escape_name(node.op_type)})"
        node_record = Node(
            node.name or "",
            node.domain,
            node.op_type,
            node.overload,
            ["" if v is None else self._name(v, f"{where}, input") for v in node.inputs],
            [v.name or "" for v in node.outputs],
        )
        self._lengths(
            where, node_record.name, node_record.domain, node_record.op_type, *node_record.outputs
        )
        for value in node.outputs:
            if not value.name and (value.uses() or value.is_graph_output()):
                self._problems.add(NO_NAME, f"{where}, output")
        record.nodes.append(node_record)
        return node_record

    def attributes(
        self, attributes: Mapping[str, ir.Attr], where: str
    ) -> Iterator[tuple[str, ir.Graph]]:
        for name, attribute in attributes.items():
            if attribute.is_ref() or attribute.value is None:
                continue
            label = f"{where}, attribute {quote(name)}"
            match attribute.type:
                case ir.AttributeType.TENSOR:
                    self._tensor(attribute.value, label)
                case ir.AttributeType.TENSORS:
                    for tensor in attribute.value:
                        self._tensor(tensor, label)
                case ir.AttributeType.GRAPH:
                    yield name, attribute.value
                case ir.AttributeType.GRAPHS:
                    for graph in attribute.value:
                        yield name, graph

    def _initializer(self, value: ir.Value, where: str) -> None:
        label = f"{where}initializer {quote(value.name)}"
        if value.const_value is None:
            self._problems.add(NO_DATA, label)
        else:
            self._tensor(value.const_value, label)

    def _tensor(self, tensor: ir.TensorProtocol, where: str) -> None:
        files = self._files[_base_directory(tensor)]
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            check_tensor(tensor.raw, where, self._limits, self._problems, files)
            return
        size = check_dims(tensor.shape.numpy(), where, self._limits, self._problems)
        if size is None or not isinstance(tensor, ir.ExternalTensor):
            return
        try:
            files.region(os.fspath(tensor.location), tensor.offset, tensor.length, tensor.nbytes)
        except ExternalDataError as error:
            kind = error.kind
            if kind is NO_DIRECTORY:
                kind = ProblemKind("external data without a base directory", kind.hint)
            self._problems.add(kind, f"{where}: {error.detail}")

    def _name(self, value: ir.Value, where: str) -> str:
        if not value.name:
            self._problems.add(NO_NAME, where)
            return ""
        self._lengths(where, value.name)
        return value.name

    def _lengths(self, where: str, *names: str) -> None:
        for name in names:
            if len(name) > self._limits.name_length:
                self._problems.add(LONG_NAME, f"{where}: {len(name)} characters, {quote(name)}")


def normalize_loaded(model: ir.Model, problems: Problems, files: Files) -> None:
    """Make a model own its tensors, and normalize what ONNX can express in several ways.

    Normalizes the name of the default domain, initializers that are also inputs, values that shadow
    outer values, missing graph names and unknown types.
    """
    for function in model.functions.values():
        _normalize_domain(function.opset_imports)
        for _ in _own_attributes(function.attributes, files):
            pass  # the reader rejects graphs as default values
    _normalize_domain(model.opset_imports)
    for root in (model.graph, *(function.graph for function in model.functions.values())):
        names = _Names(root)
        pending: list[tuple[ir.Graph, tuple[set[str], ...]]] = [(root, ())]
        while pending:
            graph, outer = pending.pop()
            _normalize_graph(graph, problems, files)
            names.rename_shadowing(graph, outer)
            inner: tuple[set[str], ...] = ()
            for node in graph:
                for subgraph in _own_attributes(node.attributes, files):
                    inner = inner or (*outer, _defined_names(graph))
                    pending.append((subgraph, inner))
    for value in model.graph.inputs:
        if value.type is None:
            problems.add(NO_TYPE, quote(value.name))


def _normalize_graph(graph: ir.Graph, problems: Problems, files: Files) -> None:
    graph.name = graph.name or "graph"  # onnx's checker requires a name
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        tensor = to_owned_tensor(value.const_value, files[_base_directory(value.const_value)])
        if not _matches_declared_type(value, tensor):
            declared = f"{value.dtype and value.dtype.name}{value.shape}"
            detail = f"{quote(name)}: {tensor.dtype.name}{tensor.shape}, declared {declared}"
            problems.add(CONTRADICTION, detail)
        value.const_value = tensor
        value.type = ir.TensorType(tensor.dtype)
        value.shape = ir.Shape(tensor.shape.numpy())
    # An initializer that is also an input is its default value; treat it as a constant. IR version
    # 3 required listing every initializer as an input.
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    if len(inputs) < len(graph.inputs):
        graph.inputs.clear()
        graph.inputs.extend(inputs)
    for value in graph.inputs:
        _drop_unknown_type(value)
    for node in graph:
        for value in node.outputs:
            _drop_unknown_type(value)


def _own_attributes(attributes: MutableMapping[str, ir.Attr], files: Files) -> Iterator[ir.Graph]:
    """Replace the tensors in ``attributes`` by owned copies; yield the graphs in them."""
    for name, attribute in list(attributes.items()):
        if attribute.is_ref() or attribute.value is None:
            continue
        doc = attribute.doc_string
        # Read .value: as_tensor() runs a slow isinstance check of a whole protocol.
        match attribute.type:
            case ir.AttributeType.TENSOR:
                tensor = attribute.value
                tensor = to_owned_tensor(tensor, files[_base_directory(tensor)])
                attributes[name] = ir.AttrTensor(name, tensor, doc_string=doc)
            case ir.AttributeType.TENSORS:
                tensors = [to_owned_tensor(t, files[_base_directory(t)]) for t in attribute.value]
                attributes[name] = ir.AttrTensors(name, tensors, doc_string=doc)
            case ir.AttributeType.GRAPH:
                yield attribute.value
            case ir.AttributeType.GRAPHS:
                yield from attribute.value


def repair_nodes(model: ir.Model) -> None:
    """Rewrite nodes that onnxruntime loads although they are not valid, in place."""
    for root in (model.graph, *(function.graph for function in model.functions.values())):
        pending = [root]
        while pending:
            for node in pending.pop():
                pending += subgraphs_of(node)
                if node.op_type in _UNCHECKED and node.domain in ("", "ai.onnx", RUNTIME_DOMAIN):
                    for line in _drop_unknown_attributes(node):
                        record_load_repair(model, f"{_label(node)}: {line}")


# onnxruntime accepts any attribute of these operators and ignores the ones it does not know.
_UNCHECKED = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
_LAYER_NORM_ATTRIBUTES = frozenset({"axis", "epsilon", "stash_type"})


def _drop_unknown_attributes(node: ir.Node) -> Iterator[str]:
    for name in [name for name in node.attributes if name not in _LAYER_NORM_ATTRIBUTES]:
        del node.attributes[name]
        yield f"unknown attribute {quote(name)} left out, which onnxruntime ignores"


def _matches_declared_type(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    if value.dtype not in (None, ir.DataType.UNDEFINED, tensor.dtype):
        return False
    if value.shape is None:
        return True
    dims = tensor.shape.numpy()
    return len(value.shape) == len(dims) and all(
        not isinstance(declared, int) or declared < 0 or declared == dim
        for declared, dim in zip(value.shape, dims, strict=True)
    )


def _drop_unknown_type(value: ir.Value) -> None:
    """Remove an undefined type, and replace negative dimensions by unknown ones."""
    if isinstance(value.type, ir.TensorType) and value.type.dtype == ir.DataType.UNDEFINED:
        value.type = None
    if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
        value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])


def _normalize_domain(imports: dict[str, int]) -> None:
    if "ai.onnx" in imports:
        imports[""] = imports.pop("ai.onnx")


def _defined_names(graph: ir.Graph) -> set[str]:
    names = {value.name for value in graph.inputs} | set(graph.initializers)
    names.update(value.name for node in graph for value in node.outputs)
    return {name for name in names if name}


class _Names:
    """The value names of a graph and its subgraphs, and a generator of unused names."""

    def __init__(self, root: ir.Graph) -> None:
        self._used: set[str] = set()
        self._next: dict[str, int] = {}
        pending = [root]
        while pending:
            graph = pending.pop()
            self._used |= _defined_names(graph)
            for node in graph:
                pending += subgraphs_of(node)

    def rename_shadowing(self, graph: ir.Graph, outer: tuple[set[str], ...]) -> None:
        """Rename the values of a subgraph that have the name of an outer value.

        Such names are valid ONNX (those of node outputs, if the outer value is computed later), but
        nodes added to this graph could not refer to the outer value.
        """
        computed = [y for node in graph for y in node.outputs if y.name]
        for value in (*graph.inputs, *graph.initializers.values(), *computed):
            assert value.name is not None
            if any(value.name in names for names in outer):
                value.name = self._unused(value.name)

    def _unused(self, name: str) -> str:
        number = self._next.get(name, 2)
        while f"{name}.{number}" in self._used:
            number += 1
        self._next[name] = number + 1
        return f"{name}.{number}"


def _base_directory(tensor: ir.TensorProtocol) -> str:
    return os.fspath(tensor.base_dir) if isinstance(tensor, ir.ExternalTensor) else ""


INVALID_NODES = ProblemKind(
    "nodes that violate the definition of their operator",
    INVALID,
)

_SINGLE_PARAMETER = onnx.defs.OpSchema.FormalParameterOption.Single
_AXIS_ATTRIBUTES = frozenset({"axis", "batch_axis", "time_axis"})
_MAX_AXIS = 64  # runtimes truncate larger values to 32 bits and then use another axis
_FLAG_ATTRIBUTES = frozenset({"keepdims"})  # runtimes disagree on values other than 0 and 1
_SchemaCache = dict[tuple[str, str], onnx.defs.OpSchema | None]


def check_nodes(model: ir.Model, problems: Problems) -> None:
    """Record every node that violates its operator's schema."""
    local_functions = set(model.functions)
    bodies = [(model.graph, model.opset_imports)]
    bodies += [(f.graph, f.opset_imports) for f in model.functions.values()]
    for root, imports in bodies:
        schemas: _SchemaCache = {}
        pending = [root]
        while pending:
            for node in pending.pop():
                pending += subgraphs_of(node)
                if (node.domain, node.op_type, node.overload) in local_functions:
                    continue
                key = node.domain, node.op_type
                if key not in schemas:
                    schemas[key] = _schema(*key, imports.get(node.domain, 0))
                schema = schemas[key]
                if schema is not None and not schema.deprecated:
                    for error in (*_schema_errors(node, schema), *body_errors(node)):
                        problems.add(INVALID_NODES, f"{_label(node)}: {error}")


def _schema(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    if not onnx.defs.has(op_type, domain=domain, max_inclusive_version=version):
        return None
    return onnx.defs.get_schema(op_type, domain=domain, max_inclusive_version=version)


def _schema_errors(node: ir.Node, schema: onnx.defs.OpSchema) -> Iterator[str]:
    counts = (
        ("inputs", len(node.inputs), schema.min_input, schema.max_input),
        ("outputs", len(node.outputs), schema.min_output, schema.max_output),
    )
    for kind, count, least, most in counts:
        if not least <= count <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            yield f"{count} {kind}, {schema.name} has {expected}"
    for value, formal in zip(node.inputs, schema.inputs, strict=False):
        if value is None and formal.option == _SINGLE_PARAMETER:
            yield f"missing input {formal.name}, which {schema.name} requires"
    for name, attribute in node.attributes.items():
        formal_attribute = schema.attributes.get(name)
        if formal_attribute is None:
            yield f"unknown attribute {quote(name)}, which {schema.name} does not have"
            continue
        # onnx's type stubs do not declare this enum.
        expected = str(formal_attribute.type).rpartition(".")[2]
        if expected != attribute.type.name:
            yield f"attribute {quote(name)} of type {attribute.type.name}, expected {expected}"
        elif (
            name in _AXIS_ATTRIBUTES
            and not attribute.is_ref()
            and abs(attribute.as_int()) > _MAX_AXIS
        ):
            yield f"attribute {quote(name)} is {attribute.as_int()}, beyond any tensor's rank"
        elif (
            name in _FLAG_ATTRIBUTES and not attribute.is_ref() and attribute.as_int() not in (0, 1)
        ):
            yield f"attribute {quote(name)} is {attribute.as_int()}, expected 0 or 1"
    for name, formal_attribute in schema.attributes.items():
        if formal_attribute.required and name not in node.attributes:
            yield f"missing attribute {quote(name)}, which {schema.name} requires"


def _label(node: ir.Node) -> str:
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"node {quote(name)} ({escape_name(node.op_type)})"
