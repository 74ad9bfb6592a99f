"""The optimizer's update over vectors of any length, one model for all parameters treated alike.

Optimizers treat most elements alike, whatever tensor they belong to. Then one small graph over a
vector serves all parameters, piece by piece, and what a piece needs stays in the cache. What
depends on learning rate and step alone is the same for all pieces: it is a model of its own,
which runs once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.artifacts.graphs import Backward, Finished, emit_update
from onnxtrain.artifacts.options import BuildOptions
from onnxtrain.artifacts.signature import GraphSignature, dtype_from_name
from onnxtrain.artifacts.update.plain_gradients import gradient_graph
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET
from onnxtrain.graph.simplify import simplify
from onnxtrain.manifest import StateSpec, WeightSpec
from onnxtrain.optim.packing import alike

_LENGTH = "n"
_CONTROLS = {"learning_rate": ("lr", ir.DataType.FLOAT), "step": ("step", ir.DataType.INT64)}


def vector_models(
    origin: Backward,
    options: BuildOptions,
    weights: Sequence[WeightSpec],
    state: Sequence[StateSpec],
    accumulate: int,
) -> list[Finished]:
    """Return the models of a step over vectors; none if the update is not one of single elements.

    Args:
        origin: the gradients.
        options: what was asked for.
        weights: the parameters.
        state: of the optimizer.
        accumulate: batches per update; with more than one, gradients are summed up elsewhere.
    """
    wanted = accumulate == 1 and _is_wanted(options, state)
    if not wanted or not _is_elementwise(options, weights, state):
        return []
    gradients = gradient_graph(origin, options)
    updated = {t.feeds for t in gradients[1].outputs_of("parameter")}
    groups = _groups(options, [w for w in weights if w.name not in updated], state)
    updates = _update_models(options, groups) if groups else []
    return [] if updates is None else [gradients, *updates]


def _is_wanted(options: BuildOptions, state: Sequence[StateSpec]) -> bool:
    """Return whether a trainer for this target runs these models.

    On a device, an update without state is not worth a second call.
    """
    target = options.target
    return target.prefers("vector-update") and (bool(state) or not target.gpu)


def _is_elementwise(
    options: BuildOptions, weights: Sequence[WeightSpec], state: Sequence[StateSpec]
) -> bool:
    if not options.optimizer.elementwise or options.clip.norm is not None:
        return False
    like = {w.name: (w.dtype, w.shape) for w in weights}
    return all(like.get(s.parameter) == (s.dtype, s.shape) for s in state)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parameters with the same update."""

    dtype: ir.DataType
    slots: tuple[str, ...]
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """The parameter that stands for all."""
        return self.members[0]


def _groups(
    options: BuildOptions, weights: Sequence[WeightSpec], state: Sequence[StateSpec]
) -> list[_Group]:
    dtypes = {w.name: w.dtype for w in weights}
    return [
        _Group(
            dtype_from_name(dtypes[names[0]]),
            tuple(s.slot for s in state if s.parameter == names[0]),
            names,
        )
        for names in alike(options.optimizer, dtypes)
    ]


@dataclasses.dataclass
class _Vectors:
    """The values of a group in the graph of all groups."""

    group: _Group
    parameter: ir.Value
    gradient: ir.Value
    slots: dict[str, ir.Value]
    new: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict[ir.Value, ir.Value])
    """What replaces parameter and state."""
    nodes: list[ir.Node] = dataclasses.field(default_factory=list[ir.Node])

    @property
    def inputs(self) -> list[ir.Value]:
        return [self.parameter, self.gradient, *self.slots.values()]


def _update_models(options: BuildOptions, groups: Sequence[_Group]) -> list[Finished] | None:
    """Emit one update per group in one graph, then cut it; ``None`` if it cannot be cut."""
    op = _builder("all", options)
    controls = {n: op.input(n, dtype, [1]) for n, (_, dtype) in _CONTROLS.items()}
    vectors = [_declare(op, group) for group in groups]
    new, new_state = emit_update(
        op,
        options,
        {v.group.name: v.parameter for v in vectors},
        {v.group.name: v.gradient for v in vectors},
        {f"{v.group.name}.{slot}": x for v in vectors for slot, x in v.slots.items()},
        controls["learning_rate"],
        controls["step"],
    )
    for v in vectors:
        results = [new[v.group.name], *(new_state[f"{v.group.name}.{s}"] for s in v.slots)]
        op.graph.outputs.extend(op.Identity(y) for y in results)
    simplify(ir.Model(op.graph, ir_version=IR_VERSION))
    outputs = iter(op.graph.outputs)
    for v in vectors:
        v.new = {x: next(outputs) for x in (v.parameter, *v.slots.values())}
    scalar_nodes = _assign(op.graph, vectors)
    if scalar_nodes is None:
        return None
    scalars = _scalars_read(vectors, [*controls.values(), *_results(scalar_nodes)])
    return [
        _scalar_model(options, controls, scalar_nodes, scalars),
        *(_update_model(options, v, scalars, i) for i, v in enumerate(vectors)),
    ]


def _declare(op: OpBuilder, group: _Group) -> _Vectors:
    parameter, gradient, *slots = (
        op.input(f"{group.name}/{key}", group.dtype, [_LENGTH])
        for key in ("parameter", "gradient", *group.slots)
    )
    return _Vectors(group, parameter, gradient, dict(zip(group.slots, slots, strict=True)))


def _assign(graph: ir.Graph, vectors: Sequence[_Vectors]) -> list[ir.Node] | None:
    """Give each node to the group whose vectors it works on; return those that work on none.

    ``None`` stands for an update that mixes parameters or branches.
    """
    owner = {x: v for v in vectors for x in v.inputs}
    scalar_nodes: list[ir.Node] = []
    for node in graph:
        owners = [owner[x] for x in node.inputs if x in owner]
        if any(v is not owners[0] for v in owners) or any(True for _ in subgraphs_of(node)):
            return None
        if owners:
            owners[0].nodes.append(node)
            owner.update(dict.fromkeys(node.outputs, owners[0]))
        else:
            scalar_nodes.append(node)
    return scalar_nodes


def _scalars_read(vectors: Sequence[_Vectors], scalars: Sequence[ir.Value]) -> dict[ir.Value, str]:
    """Return names for the scalars that updates read, in the order in which they do."""
    known = set(scalars)
    read = (x for v in vectors for node in v.nodes for x in node.inputs if x in known)
    return {x: f"scalar.{i}" for i, x in enumerate(dict.fromkeys(x for x in read if x is not None))}


def _results(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    return [y for node in nodes for y in node.outputs]


def _scalar_model(
    options: BuildOptions,
    controls: Mapping[str, ir.Value],
    nodes: Sequence[ir.Node],
    scalars: Mapping[ir.Value, str],
) -> Finished:
    """Return the model of what all updates of a step share."""
    signature = _signature("scalars", options)
    here: dict[ir.Value, ir.Value] = {}
    for name, x in controls.items():
        if x.uses():
            role, dtype = _CONTROLS[name]
            here[x] = signature.input(name, role, dtype, [1])
    _copy(signature.op, nodes, here)
    for x, name in scalars.items():
        signature.output(name, "scalar", here[x])
    return signature.build(options.target)


def _update_model(
    options: BuildOptions, v: _Vectors, scalars: Mapping[ir.Value, str], number: int
) -> Finished:
    """Return the model of one group's update."""
    signature = _signature("update", options)
    roles = {"parameter": "parameter", "gradient": "gradient", **dict.fromkeys(v.slots, "state")}
    here = {
        x: signature.input(name, role, v.group.dtype, [_LENGTH])
        for (name, role), x in zip(roles.items(), v.inputs, strict=True)
    }
    read = {x for node in v.nodes for x in node.inputs}
    for x, name in scalars.items():
        if x in read:
            dims = signature.op.static(x) or ()
            here[x] = signature.input(name, "scalar", x.dtype or v.group.dtype, dims)
    _copy(signature.op, v.nodes, here)
    for old, new in v.new.items():
        role = "parameter" if old is v.parameter else "state"
        signature.output(f"{here[old].name}.out", role, here[new], here[old])
    proto, spec = signature.build(options.target)
    file = spec.file if number == 0 else spec.file.replace(".onnx", f".{number}.onnx")
    return proto, dataclasses.replace(spec, file=file, members=v.group.members)


def _builder(name: str, options: BuildOptions) -> OpBuilder:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    return OpBuilder(graph, "update/", target=options.target)


def _signature(role: str, options: BuildOptions) -> GraphSignature:
    op = _builder(role, options)
    return GraphSignature(role, ir.Model(op.graph, ir_version=IR_VERSION), op)


def _copy(op: OpBuilder, nodes: Sequence[ir.Node], here: dict[ir.Value, ir.Value]) -> None:
    """Append copies of nodes; ``here`` says what stands for their inputs, and is completed."""
    for node in nodes:
        inputs: list[ir.Value | None] = []
        for x in node.inputs:
            if x is not None and x not in here:
                assert x.const_value is not None
                here[x] = op.const(x.const_value.numpy())
            inputs.append(None if x is None else here[x])
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes=list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
        )
        op.append(copy)
        here.update(zip(node.outputs, copy.outputs, strict=True))
