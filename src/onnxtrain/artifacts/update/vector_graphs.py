"""Graphs for training on one long vector: gradients as they are, and an update of any length.

Optimizers treat most elements alike, whatever tensor they belong to. Then one small graph over a
vector serves all parameters, piece by piece, and what a piece needs stays in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx

from onnxtrain.artifacts.update.in_place import overwritable
from onnxtrain.manifest import ModelSpec, StateSpec, TensorSpec

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Exp", "Greater", "Identity"),
        *("Less", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Sign"),
        *("Sqrt", "Sub", "Tanh", "Where"),
    }
)
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
PARAMETER, GRADIENT = "parameter", "gradient"


@dataclasses.dataclass(frozen=True)
class VectorGraph:
    """An update that is the same for several parameters, as a graph over vectors of any length."""

    model: onnx.ModelProto
    in_place: frozenset[str]
    """Inputs that their outputs, named ``<input>.out``, may overwrite."""
    members: tuple[dict[str, str], ...]
    """For each parameter: its tensors by the graph's inputs."""
    scalars: tuple[str, ...]
    """Inputs that are the same for all."""


@dataclasses.dataclass(frozen=True)
class VectorGraphs:
    """All updates, and the model that computes the scalars that they share."""

    groups: tuple[VectorGraph, ...]
    scalars: onnx.ModelProto


def without_accumulation(model: onnx.ModelProto, spec: ModelSpec) -> onnx.ModelProto | None:
    """Return the training graph with plain gradients for outputs; ``None`` if its form is unknown.

    ``Where(reset, g, old + g)`` becomes ``g``: two passes over all gradients less.
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    graph = plain.graph
    makers = {y: node for node in graph.node for y in node.output}
    reset = spec.input("reset")
    old = {t.name for t in spec.inputs_of("accumulator")}
    drop: set[str] = set()
    renamed: dict[str, list[str]] = {}
    for t in spec.outputs_of("gradient"):
        choice = makers.get(t.name)
        if choice is None or choice.op_type != "Where":
            return None
        total = makers.get(choice.input[2])
        if total is None or total.op_type != "Add" or t.feeds not in total.input:
            return None
        if choice.input[1] not in total.input:
            return None
        drop.update((t.name, total.output[0]))
        renamed.setdefault(choice.input[1], []).append(t.name)
    kept = [node for node in model.graph.node if node.output[0] not in drop]
    del graph.node[:]
    graph.node.extend(kept)
    for value, names in renamed.items():
        graph.node.extend(_identity(value, name) for name in names)
    _prune(graph)
    dropped = old | ({reset.name} if reset is not None else set())
    if dropped & {x for node in graph.node for x in node.input}:
        return None
    inputs = [x for x in graph.input if x.name not in dropped]
    del graph.input[:]
    graph.input.extend(inputs)
    return plain


def vector_graphs(
    model: onnx.ModelProto, spec: ModelSpec, state: Sequence[StateSpec]
) -> VectorGraphs | None:
    """Return an optimizer's update as graphs over vectors; ``None`` if elements are not alike."""
    graph = model.graph
    if any(a.type in _GRAPHS for node in graph.node for a in node.attribute):
        return None
    members = _members(spec, state)
    if members is None:
        return None
    owner = {name: i for i, names in enumerate(members) for name in names.values()}
    parts = _parts(graph, owner)
    if parts is None:
        return None
    types = _types(model, owner)
    scale = spec.input("grad_scale")
    ones = _copies(graph, scale.name) if scale is not None else set()
    fresh = {t.feeds: t.name for t in spec.outputs if t.feeds is not None}
    alike: dict[str, list[int]] = {}
    built: dict[str, onnx.ModelProto] = {}
    shared: dict[str, tuple[str, ...]] = {}
    for i, names in enumerate(members):
        if any(name not in fresh for key, name in names.items() if key != GRADIENT):
            return None
        made = _vector_graph(model, parts[i], names, fresh, ones, owner, types)
        if made is None:
            return None
        text = made[0].SerializeToString(deterministic=True).hex()
        alike.setdefault(text, []).append(i)
        built[text], shared[text] = made
    groups = tuple(
        VectorGraph(
            built[text],
            frozenset(overwritable(built[text], results_of(built[text]))),
            tuple(members[i] for i in numbers),
            shared[text],
        )
        for text, numbers in alike.items()
    )
    wanted = sorted({name for g in groups for name in g.scalars})
    return VectorGraphs(groups, _scalar_model(model, owner, wanted, types))


def _members(spec: ModelSpec, state: Sequence[StateSpec]) -> list[dict[str, str]] | None:
    """Return the tensors of each parameter; ``None`` if their types or shapes differ."""
    known = {t.name: t for t in spec.inputs}
    members: list[dict[str, str]] = []
    pairs = zip(spec.inputs_of("parameter"), spec.inputs_of("gradient"), strict=True)
    for p, g in pairs:
        slots = {s.slot: s.name for s in state if s.parameter == p.name}
        names = {PARAMETER: p.name, GRADIENT: g.name, **slots}
        for name in names.values():
            t = known.get(name)
            if t is None or (t.dtype, t.shape) != (p.dtype, p.shape):
                return None
        members.append(names)
    return members


def _parts(graph: onnx.GraphProto, owner: dict[str, int]) -> dict[int, list[onnx.NodeProto]] | None:
    """Return the nodes of each parameter; ``None`` if one mixes parameters or elements.

    ``owner`` says whose every value is, and is completed.
    """
    single = {x.name for x in graph.initializer if _size(x.dims) == 1}
    plain = {x.name for x in graph.input if x.name not in owner}
    shapes = {x.name for x in graph.initializer} - single
    parts: dict[int, list[onnx.NodeProto]] = {i: [] for i in set(owner.values())}
    for node in graph.node:
        tags = {owner[x] for x in node.input if x in owner}
        others = [x for x in node.input if x and x not in owner]
        if not tags:
            views = node.op_type in _VIEWS
            if not views and node.op_type not in _ELEMENTWISE:
                return None
            if any(x in shapes for x in (others[:1] if views else others)):
                return None
            plain.update(node.output)
            continue
        if len(tags) > 1 or node.op_type not in _ELEMENTWISE:
            return None
        if any(x not in single and x not in plain for x in others):
            return None
        tag = tags.pop()
        parts[tag].append(node)
        owner.update(dict.fromkeys(node.output, tag))
    return parts


def _vector_graph(
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    names: dict[str, str],
    fresh: dict[str, str],
    ones: set[str],
    owner: dict[str, int],
    types: dict[str, onnx.TypeProto],
) -> tuple[onnx.ModelProto, tuple[str, ...]] | None:
    """Return a parameter's nodes over vectors, under names that depend on the order alone."""
    local = {name: key for key, name in names.items()}
    results = {fresh[name]: f"{key}.out" for key, name in names.items() if key != GRADIENT}
    emitted: list[onnx.NodeProto] = []
    constants: dict[str, onnx.TensorProto] = {}
    known = {x.name: x for x in model.graph.initializer}
    scalars: dict[str, None] = {}
    for node in nodes:
        x = [v for v in node.input if v not in ones]
        if node.op_type == "Mul" and len(x) == 1 and node.output[0] not in results:
            local[node.output[0]] = local[x[0]]
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.ClearField("name")
        copy.ClearField("doc_string")
        copy.ClearField("metadata_props")
        for k, v in enumerate(node.input):
            if v in known:
                constants[v] = known[v]
            elif v and v not in owner:
                scalars[v] = None
            copy.input[k] = local.get(v, v)
        for k, v in enumerate(node.output):
            local[v] = results.get(v, f"v{len(local)}")
            copy.output[k] = local[v]
        emitted.append(copy)
    if not set(results.values()) <= {y for node in emitted for y in node.output}:
        return None
    kind = types[names[PARAMETER]].tensor_type.elem_type
    graph = onnx.GraphProto(name="update", node=emitted)
    graph.input.extend(_vector(n, kind) for n in names)
    graph.input.extend(onnx.ValueInfoProto(name=n, type=types[n]) for n in scalars)
    graph.output.extend(_vector(n, kind) for n in results.values())
    graph.initializer.extend(constants[n] for n in sorted(constants))
    return _model(model, graph), tuple(scalars)


def _scalar_model(
    model: onnx.ModelProto,
    owner: dict[str, int],
    wanted: Sequence[str],
    types: dict[str, onnx.TypeProto],
) -> onnx.ModelProto:
    nodes = [node for node in model.graph.node if not any(y in owner for y in node.output)]
    given = {x.name: x for x in model.graph.input if x.name not in owner}
    # An input may be wanted itself, but cannot be an output.
    nodes += [_identity(n, f"{n}.out") for n in wanted if n in given]
    graph = onnx.GraphProto(name="scalars", node=nodes, input=given.values())
    graph.initializer.extend(model.graph.initializer)
    for n in wanted:
        name = f"{n}.out" if n in given else n
        graph.output.append(onnx.ValueInfoProto(name=name, type=types[n]))
    _prune(graph)
    used = {x for node in graph.node for x in node.input}
    inputs = [x for x in graph.input if x.name in used]
    del graph.input[:]
    graph.input.extend(inputs)
    return _model(model, graph)


def _identity(x: str, y: str) -> onnx.NodeProto:
    return onnx.NodeProto(op_type="Identity", input=[x], output=[y])


def _vector(name: str, kind: int) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    info.type.tensor_type.elem_type = kind
    info.type.tensor_type.shape.dim.add().dim_param = "n"
    return info


def _model(like: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    return onnx.ModelProto(graph=graph, opset_import=like.opset_import, ir_version=like.ir_version)


def _types(model: onnx.ModelProto, owner: dict[str, int]) -> dict[str, onnx.TypeProto]:
    """Return the types of inputs and of all that belongs to no parameter."""
    nodes = [node for node in model.graph.node if not any(y in owner for y in node.output)]
    part = onnx.GraphProto(name="scalars", node=nodes, input=model.graph.input)
    part.initializer.extend(model.graph.initializer)
    whole = _model(model, part)
    graph = onnx.shape_inference.infer_shapes(whole, strict_mode=True, data_prop=True).graph
    return {v.name: v.type for v in (*graph.input, *graph.value_info)}


def _copies(graph: onnx.GraphProto, name: str) -> set[str]:
    """Return the values that hold the same number as an input."""
    copies = {name}
    for node in graph.node:
        if node.op_type in (*_VIEWS, "Cast", "Identity") and node.input[0] in copies:
            copies.update(node.output)
    return copies


def results_of(model: onnx.ModelProto) -> ModelSpec:
    """Return the outputs of an update, each with the input that it replaces."""
    outputs = tuple(
        TensorSpec(y.name, "", (), "state", y.name.removesuffix(".out")) for y in model.graph.output
    )
    return ModelSpec("update", "", (), outputs)


def _prune(graph: onnx.GraphProto) -> None:
    """Drop nodes and initializers that no output needs."""
    needed = {y.name for y in graph.output}
    kept = []
    for node in reversed(graph.node):
        if any(y in needed for y in node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(inner_names(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    tensors = [x for x in graph.initializer if x.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(tensors)


def inner_names(node: onnx.NodeProto) -> set[str]:
    """Return all names that the bodies of a node mention."""
    names: set[str] = set()
    for a in node.attribute:
        for body in (a.g, *a.graphs) if a.type in _GRAPHS else ():
            names.update(y.name for y in body.output)
            for inner in body.node:
                names.update(inner.input)
                names |= inner_names(inner)
    return names


def _size(dims: Sequence[int]) -> int:
    size = 1
    for d in dims:
        size *= d
    return size
