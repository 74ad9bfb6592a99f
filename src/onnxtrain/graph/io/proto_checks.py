"""Check an untrusted ModelProto before onnx_ir reads it.

1. :func:`check_tensor` checks dtype, shape and data of a tensor.
2. :func:`check_structure` checks scopes, order, function calls, domains and opsets of a
   :class:`Structure`, which holds the names of a model. :mod:`onnxtrain.graph.io.ir_checks` reduces
   in-memory models to the same structure, so that both pass the same checks.
3. :class:`ProtoReader` walks a ModelProto, checks each part and builds its structure.
4. :func:`body_errors` checks the inputs and outputs of If, Loop and Scan bodies.

All walks are iterative: deeply nested input cannot exhaust Python's stack.
"""

from __future__ import annotations

import copy
import graphlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto

from onnxtrain.graph.io import external_data
from onnxtrain.graph.io.external_data import DataFiles, ExternalDataError
from onnxtrain.graph.io.limits import CORRUPT, INVALID, Limits, ProblemKind, Problems, quote
from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN

UNKNOWN_DTYPE = ProblemKind("unknown data types", "the model may need a newer onnx package")
BAD_DIMS = ProblemKind("tensors with impossible dimensions", CORRUPT)
RANK_LIMIT = ProblemKind("tensors over the rank limit", "load(..., limits=Limits(rank=...))")
ELEMENT_LIMIT = ProblemKind("tensors over the size limit", "load(..., limits=Limits(elements=...))")
MISMATCH = ProblemKind("tensor data that does not match dtype and shape", CORRUPT)
SEGMENTED = ProblemKind("segmented tensors, which ONNX does not define", CORRUPT)

_DTYPES = {int(dtype): dtype for dtype in ir.DataType if dtype != ir.DataType.UNDEFINED}
_TYPED_FIELDS = (
    "float_data",
    "int32_data",
    "string_data",
    "int64_data",
    "double_data",
    "uint64_data",
)
# TensorProto stores every other dtype in int32_data.
_DATA_FIELDS = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.COMPLEX64: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.COMPLEX128: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT32: "uint64_data",
    ir.DataType.UINT64: "uint64_data",
    ir.DataType.STRING: "string_data",
}
_ITEMS_PER_ELEMENT = {ir.DataType.COMPLEX64: 2, ir.DataType.COMPLEX128: 2}
_ELEMENTS_PER_ITEM = {4: 2, 2: 4}  # by bit width: several elements share an int32


def known_dtype(number: int) -> bool:
    """Return whether ``number`` is a defined value of ``TensorProto.DataType``."""
    return number in _DTYPES


def check_dims(dims: Sequence[int], where: str, limits: Limits, problems: Problems) -> int | None:
    """Return the number of elements of a shape; record a problem and return None if invalid."""
    if len(dims) > limits.rank:
        problems.add(RANK_LIMIT, f"{where}: rank {len(dims)}, the limit is {limits.rank}")
        return None
    if any(dim < 0 for dim in dims):
        problems.add(BAD_DIMS, f"{where}: {list(dims)}")
        return None
    # A zero must not hide the other dimensions: NumPy has no arrays of shape [0, 2**62] either.
    if math.prod(max(dim, 1) for dim in dims) > limits.elements:
        problems.add(
            ELEMENT_LIMIT, f"{where}: {list(dims)}, the limit is {limits.elements} elements"
        )
        return None
    return math.prod(dims)


def check_tensor(
    tensor: onnx.TensorProto, where: str, limits: Limits, problems: Problems, files: DataFiles
) -> None:
    """Record everything that makes a tensor unsafe to read."""
    if tensor.data_type not in _DTYPES:
        problems.add(UNKNOWN_DTYPE, f"{where}: data type {tensor.data_type}")
        return
    dtype = _DTYPES[tensor.data_type]
    size = check_dims(tensor.dims, where, limits, problems)
    if size is None:
        return
    where = f"{where}: {dtype.name}{list(tensor.dims)}"
    if tensor.HasField("segment"):
        problems.add(SEGMENTED, where)
        return
    used = [field for field in _TYPED_FIELDS if len(getattr(tensor, field))]
    if tensor.HasField("raw_data"):
        used.append("raw_data")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if used or dtype == ir.DataType.STRING:
            problems.add(MISMATCH, f"{where} cannot be external and in {', '.join(used) or 'text'}")
            return
        _check_external(tensor, where, byte_count(dtype, size), problems, files)
        return
    detail = _mismatch(tensor, dtype, size, used)
    if detail:
        problems.add(MISMATCH, f"{where} {detail}")


def byte_count(dtype: ir.DataType, size: int) -> int:
    """Return the bytes of ``size`` elements; sub-byte types are packed."""
    return (size * dtype.bitwidth + 7) // 8


def _mismatch(
    tensor: onnx.TensorProto, dtype: ir.DataType, size: int, used: list[str]
) -> str | None:
    if len(used) > 1:
        return f"has data in {' and in '.join(used)}"
    if used == ["raw_data"]:
        if dtype == ir.DataType.STRING:
            return "cannot be in raw_data"
        need, have = byte_count(dtype, size), len(tensor.raw_data)
        return f"needs {need} bytes, raw_data has {have}" if need != have else None
    field = _DATA_FIELDS.get(dtype, "int32_data")
    if used and used != [field]:
        return f"must be in {field}, not in {used[0]}"
    need = size * _ITEMS_PER_ELEMENT.get(dtype, 1)
    if dtype != ir.DataType.STRING:
        need = -(-need // _ELEMENTS_PER_ITEM.get(dtype.bitwidth, 1))
    have = len(getattr(tensor, field))
    return f"needs {need} items, {field} has {have}" if need != have else None


def _check_external(
    tensor: onnx.TensorProto, where: str, nbytes: int, problems: Problems, files: DataFiles
) -> None:
    try:
        location, offset, length = external_data.entries(tensor)
        files.region(location, offset, length, nbytes)
    except ExternalDataError as error:
        problems.add(error.kind, f"{where}: {error.detail}")


def to_owned_tensor(tensor: ir.TensorProtocol, files: DataFiles) -> ir.TensorProtocol:
    """Return a copy of a tensor that does not refer to a protobuf or to the caller's tensor.

    Immutable elements are shared; name and metadata are not.
    """
    if isinstance(tensor, ir.ExternalTensor):
        return external_data.to_tensor(tensor, files)
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(
            list(tensor.string_data()),
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props) or None,
        )
    if isinstance(tensor, ir.serde.TensorProtoTensor):
        return ir.Tensor(
            tensor.numpy(),
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string or None,
            metadata_props=dict(tensor.metadata_props) or None,
        )
    return copy.copy(tensor)


TOO_MANY_NODES = ProblemKind(
    "more nodes than the limit", "if you trust the file: load(..., limits=Limits(nodes=...))"
)
TOO_DEEP = ProblemKind(
    "subgraphs or function calls nested deeper than the limit",
    "if you trust the file: load(..., limits=Limits(depth=...))",
)
REDEFINED = ProblemKind("values that are defined twice", INVALID)
DANGLING = ProblemKind("node inputs that nothing defines", INVALID)
NO_PRODUCER = ProblemKind("graph outputs that nothing produces", INVALID)
CYCLE = ProblemKind("a cycle in the graph", INVALID)
RECURSIVE = ProblemKind(
    "local functions that call themselves", "ONNX functions cannot be recursive"
)
DOMAINS = ProblemKind(
    "operators of unknown domains",
    "register a gradient rule for the operator with onnxtrain.register_vjp; "
    "load(..., allow_domains={...}) accepts operators that only run forward",
)
LAYOUT_OPTIMIZED = ProblemKind(
    "operators with a hardware-specific layout",
    "onnxruntime saved the file with ORT_ENABLE_ALL: save it with ORT_ENABLE_EXTENDED, or load the "
    "original file",
)
EXTENSIONS = ProblemKind(
    "operators of onnxruntime-extensions, which pre- or postprocess data",
    "extract the part of the model between them, for example with onnx.utils.extract_model, and "
    "train that",
)
NO_OPSET = ProblemKind("operator domains without an opset import", INVALID)
BAD_OPSET = ProblemKind("unsupported opset imports", "newer opsets need a newer onnx package")

# Domains of the ONNX project, and that of onnxruntime's operators, which the importer decomposes.
STANDARD_DOMAINS = frozenset(
    {
        "",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        RUNTIME_DOMAIN,
    }
)

_UNSUPPORTED_DOMAINS = {
    "com.microsoft.nchwc": LAYOUT_OPTIMIZED,
    "com.ms.internal.nhwc": LAYOUT_OPTIMIZED,
    "ai.onnx.contrib": EXTENSIONS,
    "com.microsoft.extensions": EXTENSIONS,
}

_MAX_VERSION = (1 << 31) - 1  # onnx's functions accept a 32-bit int

FunctionKey = tuple[str, str, str]  # domain, name, overload of a local function


@dataclass(slots=True)
class Node:
    """The names of a node; an omitted optional input or output is ``""``."""

    name: str
    domain: str
    op_type: str
    overload: str
    inputs: list[str]
    outputs: list[str]
    subgraphs: list[Graph] = field(default_factory=lambda: [])

    @property
    def key(self) -> FunctionKey:
        """The key of the local function that this node calls, if it exists."""
        return self.domain, self.op_type, self.overload

    def __str__(self) -> str:
        if self.name:
            return f"node {quote(self.name)} ({escape_name(self.op_type)})"
        outputs = ", ".join(quote(name) for name in self.outputs[:1])
        return (
            f"node of {outputs} ({escape_name(self.op_type)})"
            if outputs
            else escape_name(self.op_type)
        )


@dataclass(slots=True)
class Graph:
    """The names of a graph, subgraph or function body."""

    where: str
    """Prefix of the graph's lines in error messages."""
    inputs: list[str] = field(default_factory=list[str])
    initializers: list[str] = field(default_factory=list[str])
    nodes: list[Node] = field(default_factory=list[Node])
    outputs: list[str] = field(default_factory=list[str])
    opsets: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Opset imports of the model or function; empty for subgraphs."""


@dataclass(slots=True)
class Structure:
    """The names of a whole model."""

    graph: Graph
    functions: dict[FunctionKey, Graph] = field(default_factory=dict[FunctionKey, Graph])


@dataclass(slots=True)
class _Scope:
    """A graph, the scope around it and the names it defines."""

    graph: Graph
    outer: _Scope | None
    holder: int
    """Index in ``outer.graph.nodes`` of the node whose attribute is this graph."""
    depth: int
    producer_index: dict[str, int] = field(default_factory=dict[str, int])
    """Index of the node that produces a value; -1 for inputs and initializers."""


def canonical_domain(domain: str) -> str:
    """Return a domain with ``"ai.onnx"`` replaced by ``""``."""
    return "" if domain == "ai.onnx" else domain


def escape_name(name: str) -> str:
    """Return a name escaped and truncated like `quote`, without quotes."""
    return quote(name)[1:-1]


def check_structure(
    model: Structure, limits: Limits, problems: Problems, allow_domains: Collection[str]
) -> bool:
    """Record all problems of a structure; return whether its nodes are in topological order."""
    is_sorted = True
    for body in (model.graph, *model.functions.values()):
        scopes = list(_scopes(body))
        for scope in scopes:
            _define(scope, problems)
        is_sorted &= _check_uses(scopes, problems)
        _check_domains(body, scopes, model, allow_domains, problems)
    _check_expansion(model, limits, problems)
    return is_sorted


def _scopes(body: Graph) -> Iterator[_Scope]:
    """Yield the scopes of all graphs in ``body``, outer ones first."""
    pending = [_Scope(body, None, -1, 0)]
    while pending:
        scope = pending.pop()
        yield scope
        for index, node in enumerate(scope.graph.nodes):
            pending += [_Scope(sub, scope, index, scope.depth + 1) for sub in node.subgraphs]


def _define(scope: _Scope, problems: Problems) -> None:
    """Fill ``producer_index``; record names defined twice and outputs that hide outer values."""
    graph, producer_index = scope.graph, scope.producer_index
    for name in graph.inputs:
        if name in producer_index:
            problems.add(REDEFINED, f"{graph.where}two inputs {quote(name)}")
        producer_index[name] = -1
    seen: set[str] = set()
    for name in graph.initializers:  # an input may have an initializer, its default value
        if name in seen:
            problems.add(REDEFINED, f"{graph.where}two initializers {quote(name)}")
        seen.add(name)
        producer_index[name] = -1
    for index, node in enumerate(graph.nodes):
        for name in node.outputs:
            if not name:
                continue
            if _is_visible(scope, name):
                problems.add(REDEFINED, f"{graph.where}{quote(name)}, again by {node}")
            producer_index[name] = index


def _defining_scope(scope: _Scope, name: str) -> _Scope | None:
    inner: _Scope | None = scope
    while inner is not None and name not in inner.producer_index:
        inner = inner.outer
    return inner


def _is_visible(scope: _Scope, name: str) -> bool:
    """Return whether a name is defined in a scope, or outside of it before the node that holds it.

    A body may define a name that a later node of the graph around it defines, too.
    """
    if name in scope.producer_index:
        return True
    while scope.outer is not None:
        holder, scope = scope.holder, scope.outer
        if name in scope.producer_index:
            return scope.producer_index[name] < holder
    return False


def _check_uses(scopes: list[_Scope], problems: Problems) -> bool:
    """Record undefined names and cycles; return whether all nodes are in topological order."""
    for scope in scopes:
        where = scope.graph.where
        for node in scope.graph.nodes:
            for name in node.inputs:
                if name and _defining_scope(scope, name) is None:
                    problems.add(DANGLING, f"{where}{quote(name)} of {node}")
        for name in scope.graph.outputs:
            if name not in scope.producer_index:
                problems.add(NO_PRODUCER, f"{where}{quote(name)}")
    unsorted = {id(s): s for s, reader, producer in _edges(scopes) if producer >= reader}
    if not unsorted:
        return True
    # Store edges only for unsorted graphs, which are rare.
    predecessors: dict[int, dict[int, set[int]]] = {key: {} for key in unsorted}
    for scope, reader, producer in _edges(scopes):
        if id(scope) in predecessors:
            predecessors[id(scope)].setdefault(reader, set()).add(producer)
    for key, scope in unsorted.items():
        try:
            graphlib.TopologicalSorter(predecessors[key]).prepare()
        except graphlib.CycleError as error:
            cycle: list[int] = error.args[1]
            names = [str(scope.graph.nodes[index]) for index in cycle]
            names = names if len(names) <= 6 else [*names[:5], "..."]
            problems.add(CYCLE, scope.graph.where + " -> ".join(names))
    return False


def _edges(scopes: list[_Scope]) -> Iterator[tuple[_Scope, int, int]]:
    """Yield (scope, reader, producer), where the indices refer to the nodes of the scope.

    The node that holds a subgraph counts as the reader of the outer values it reads.
    """
    for scope in scopes:
        for index, node in enumerate(scope.graph.nodes):
            for name in node.inputs:
                inner, reader = scope, index
                while name and name not in inner.producer_index:
                    if inner.outer is None:
                        break
                    inner, reader = inner.outer, inner.holder
                producer = inner.producer_index.get(name, -1)
                if producer >= 0:
                    yield inner, reader, producer


def _check_domains(
    body: Graph,
    scopes: list[_Scope],
    model: Structure,
    allow_domains: Collection[str],
    problems: Problems,
) -> None:
    imported: dict[str, int] = {}
    for domain, version in body.opsets:
        domain, where = canonical_domain(domain), f"{body.where}domain {quote(domain)}"
        if imported.setdefault(domain, version) != version:
            problems.add(BAD_OPSET, f"{where}: versions {imported[domain]} and {version}")
        newest = _newest_opset(domain)
        if not 1 <= version <= (newest or _MAX_VERSION):
            supported = f", onnx {onnx.__version__} supports 1 to {newest}" if newest else ""
            problems.add(BAD_OPSET, f"{where}: version {version}{supported}")
    missing: dict[str, Node] = {}
    if not imported:
        problems.add(NO_OPSET, f"{body.where}no opset imports")
        return
    for scope in scopes:
        for node in scope.graph.nodes:
            allowed = node.domain in STANDARD_DOMAINS or node.domain in allow_domains
            if not allowed and node.key not in model.functions:
                kind = _UNSUPPORTED_DOMAINS.get(node.domain, DOMAINS)
                problems.add(kind, f"{scope.graph.where}{quote(node.domain)}: {node}")
            elif node.domain not in imported and node.domain != RUNTIME_DOMAIN:
                missing.setdefault(node.domain, node)
    for domain, node in missing.items():
        problems.add(NO_OPSET, f"{body.where}domain {quote(domain)}, used by {node}")


def _newest_opset(domain: str) -> int | None:
    if domain == "":
        return onnx.defs.onnx_opset_version()
    if domain == "ai.onnx.ml":
        return onnx.defs.onnx_ml_opset_version()
    return None


def _check_expansion(model: Structure, limits: Limits, problems: Problems) -> None:
    """Check node count and depth after inlining functions, whose size can grow exponentially."""
    bodies: dict[FunctionKey | None, Graph] = {**model.functions, None: model.graph}
    calls: dict[FunctionKey | None, list[tuple[FunctionKey, int]]] = {}
    size: dict[FunctionKey | None, int] = {}
    depth: dict[FunctionKey | None, int] = {}
    for key, body in bodies.items():
        calls[key], size[key], depth[key] = [], 0, 0
        for scope in _scopes(body):
            size[key] += len(scope.graph.nodes)
            depth[key] = max(depth[key], scope.depth)
            for node in scope.graph.nodes:
                if node.key in model.functions:
                    calls[key].append((node.key, scope.depth + 1))
    called = {key: {callee for callee, _ in callees} for key, callees in calls.items()}
    try:
        order = list(graphlib.TopologicalSorter(called).static_order())
    except graphlib.CycleError as error:
        names = [quote("::".join(part for part in key if part)) for key in error.args[1][:6]]
        problems.add(RECURSIVE, " -> ".join(names))
        return
    for key in order:
        for callee, level in calls[key]:
            size[key] = min(size[key] + size[callee], limits.nodes + 1)
            depth[key] = max(depth[key], level + depth[callee])
    if max(size.values()) > limits.nodes:
        raise problems.refusal(
            TOO_MANY_NODES, f"over {limits.nodes} nodes once the local functions are inlined"
        )
    deepest = max(depth.values())
    if deepest > limits.depth:
        detail = f"{deepest} levels once the local functions are inlined"
        raise problems.refusal(TOO_DEEP, f"{detail}, the limit is {limits.depth}")


NOT_TEXT = ProblemKind("text that is not UTF-8", "the file is damaged; export the model again")
LONG_NAME = ProblemKind("names over the length limit", "load(..., limits=Limits(name_length=...))")
NO_NAME = ProblemKind("parts of the model without a name", INVALID)
BAD_ATTRIBUTE = ProblemKind("attributes whose value does not match their type", INVALID)
BAD_REFERENCE = ProblemKind("attributes that refer to a parameter no function declares", INVALID)
BAD_TYPE = ProblemKind("values of a type that cannot be used", INVALID)
MAPS = ProblemKind(
    "values of map type, which cannot be differentiated",
    "export scikit-learn classifiers with options={'zipmap': False}",
)
SPARSE = ProblemKind(
    "sparse tensors, which are not supported", "store the weights as dense tensors"
)

_ATTRIBUTE_FIELDS = {
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
_NON_VALUE_FIELDS = {"name", "doc_string", "type", "ref_attr_name"}
_NEEDS_VALUE = {"t", "g", "tp"}  # scalars and strings may be absent: protobuf omits 0 and ""


class ProtoReader:
    """Reads a ModelProto into a `Structure` and records the problems of each part."""

    def __init__(self, limits: Limits, problems: Problems, files: DataFiles) -> None:
        self._limits = limits
        self._problems = problems
        self._files = files
        self._nodes = 0
        self.has_device_configurations = False

    def read(self, model: onnx.ModelProto) -> Structure:
        """Return the structure of a model; raise an error immediately at a size limit."""
        self._texts("the model", model, "producer_name", "producer_version", "domain")
        structure = Structure(Graph("", opsets=self._opsets(model.opset_import)))
        self._walk(model.graph, structure.graph, None)
        for function in model.functions:
            self._names("a function", function.domain, function.name, function.overload)
            key = (canonical_domain(function.domain), function.name, function.overload)
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
                    child = Graph(f"in {node}, {escape_name(name)}: ")
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
            canonical_domain(proto.domain),
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
        """Check an attribute; return (name, graph) for each graph in it, for the caller to walk."""
        self._names(where, proto.name, proto.ref_attr_name)
        self._texts(where, proto)
        where = f"{where}, attribute {quote(proto.name)}"
        if not proto.name:
            self._problems.add(NO_NAME, where)
        field = _ATTRIBUTE_FIELDS.get(proto.type)
        if proto.ref_attr_name:
            if declared is None or proto.ref_attr_name not in declared:
                self._problems.add(BAD_REFERENCE, f"{where}: {quote(proto.ref_attr_name)}")
            return []
        present = {f.name for f, _ in proto.ListFields()} - _NON_VALUE_FIELDS
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

    def _value_info(self, info: onnx.ValueInfoProto, label: str) -> None:
        self._names(label, info.name)
        self._texts(label, info)
        where = f"{label} {quote(info.name)}"
        if not info.name:
            self._problems.add(NO_NAME, f"an {label}" if label[0] in "aeiou" else f"a {label}")
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
                RANK_LIMIT, f"{where}: rank {len(shape.dim)}, the limit is {self._limits.rank}"
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
            # protobuf returns bytes for a string field that is not UTF-8.
            if not isinstance(name, str):
                self._problems.add(NOT_TEXT, f"{where}: {quote(name)}")
            elif len(name) > self._limits.name_length:
                self._problems.add(LONG_NAME, f"{where}: {len(name)} characters, {quote(name)}")

    def _texts(self, where: str, proto: Any, *fields: str) -> None:
        for name in (*fields, "doc_string"):
            if not isinstance(getattr(proto, name), str):
                self._problems.add(NOT_TEXT, f"{where}: {name}")
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


_LOOP_STATE_START = 2  # the first inputs of a Loop are the trip count and the condition


def body_errors(node: ir.Node) -> Iterator[str]:
    """Yield what is wrong with the inputs and outputs of a node's If, Loop or Scan bodies."""
    check = _CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return iter(()) if check is None else check(node)


def _body(node: ir.Node, name: str) -> ir.Graph | None:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.GRAPH:
        return None
    return attribute.as_graph()


def _count_errors(kind: str, actual: int, expected: int) -> Iterator[str]:
    if actual != expected:
        yield f"the body has {actual} {kind}, expected {expected}"


def _duplicate_outputs(body: ir.Graph | None) -> Iterator[str]:
    """Yield an error for a value that a body returns twice: onnxruntime fills only one of them."""
    outputs = [] if body is None else list(body.outputs)
    duplicate = next((y for i, y in enumerate(outputs) if y in outputs[:i]), None)
    if duplicate is not None:
        name = quote(duplicate.name or "")
        yield f"the body returns {name} twice; onnxruntime requires an Identity for one of them"


def _check_if(node: ir.Node) -> Iterator[str]:
    for name in ("then_branch", "else_branch"):
        body = _body(node, name)
        if body is not None and len(body.outputs) < len(node.outputs):
            yield f"{name} has {len(body.outputs)} outputs, expected {len(node.outputs)}"
        yield from _duplicate_outputs(body)


def _check_loop(node: ir.Node) -> Iterator[str]:
    body = _body(node, "body")
    if body is None:
        return
    yield from _count_errors("inputs", len(body.inputs), max(_LOOP_STATE_START, len(node.inputs)))
    states = len(node.inputs) - _LOOP_STATE_START
    least = 1 + max(states, len(node.outputs))
    if len(body.outputs) < least:
        yield f"the body has {len(body.outputs)} outputs, expected {least}"


def _check_scan(node: ir.Node) -> Iterator[str]:
    body, count = _body(node, "body"), node.attributes.get("num_scan_inputs")
    if body is None or count is None or count.is_ref() or count.type != ir.AttributeType.INT:
        return
    batched = len(node.inputs) == len(body.inputs) + 1
    inputs = len(node.inputs) - batched  # Scan of opset 8 has sequence lengths as first input
    if not 1 <= count.as_int() <= inputs:
        yield f"num_scan_inputs is {count.as_int()}, expected 1 to {inputs}"
        return
    yield from _count_errors("inputs", len(body.inputs), inputs)
    least = max(len(node.outputs), inputs - count.as_int())
    if len(body.outputs) < least:
        yield f"the body has {len(body.outputs)} outputs, expected {least}"
    yield from _duplicate_outputs(body)
    unchanged = next((y for y in body.outputs if y in body.inputs), None)
    if unchanged is not None:
        name = quote(unchanged.name or "")
        yield f"the body returns its input {name}; onnxruntime requires an Identity in between"
    axes = node.attributes.get("scan_input_axes")
    if axes is not None and not axes.is_ref() and len(axes.as_ints()) != count.as_int():
        yield f"{len(axes.as_ints())} scan_input_axes, expected {count.as_int()}"


_CHECKS = {"If": _check_if, "Loop": _check_loop, "Scan": _check_scan}
