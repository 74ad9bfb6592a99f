"""Models for an update after every batch: gradients, and the optimizer over flat vectors.

With ``accumulate=1`` and an elementwise optimizer, a trainer does not need the training model:
its ``Where(reset, g, old + g)`` costs two passes over all gradients. :func:`vector_models` builds

* the gradient model (:func:`gradient_graph`): loss and gradients of one batch. For plain SGD it
  fuses the update into the MatMul of the gradient (:func:`fuse_sgd_update`);
* update models over a vector of any length, one for all parameters with equal settings. A trainer
  runs them on slices that fit the cache;
* the scalar model: what the update computes from learning rate and step alone, run once per step.

The end of the file, :func:`mark_in_place`, finds the outputs that may overwrite their inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.artifacts.build_options import GRAD_NORM, BuildOptions
from onnxtrain.artifacts.graphs import (
    BuiltModel,
    DifferentiatedModel,
    GraphSignature,
    dtype_from_name,
    emit_update,
)
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.manifest import ModelSpec, StateSpec, WeightSpec
from onnxtrain.optim.vectors import groups_with_equal_settings
from onnxtrain.targets import find

_LENGTH = "n"
_SCALAR_INPUTS = {"learning_rate": ("lr", ir.DataType.FLOAT), "step": ("step", ir.DataType.INT64)}


def vector_models(
    origin: DifferentiatedModel,
    options: BuildOptions,
    weights: Sequence[WeightSpec],
    state: Sequence[StateSpec],
) -> list[BuiltModel]:
    """Return gradient, scalar and update models; none if the update is not elementwise.

    Args:
        origin: the differentiated model.
        options: options of the build.
        weights: the parameters.
        state: state of the optimizer.
    """
    if options.accumulate > 1 or not _target_uses_vectors(options, state):
        return []
    if not _is_elementwise(options, weights, state):
        return []
    gradients = gradient_graph(origin, options)
    updated = {t.feeds for t in gradients.spec.outputs_of("parameter")}
    groups = _groups(options, [w for w in weights if w.name not in updated], state)
    updates = _update_models(options, groups) if groups else []
    return [] if updates is None else [gradients, *updates]


def _target_uses_vectors(options: BuildOptions, state: Sequence[StateSpec]) -> bool:
    """Return whether trainers for this target run these models.

    On a GPU, an update without optimizer state is not worth a second run per step.
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
        """The name of the first parameter, whose settings all share."""
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
        for names in groups_with_equal_settings(options.optimizer, dtypes)
    ]


@dataclasses.dataclass
class _GroupValues:
    """Inputs, outputs and nodes of a group in the graph of all groups."""

    group: _Group
    parameter: ir.Value
    gradient: ir.Value
    slots: dict[str, ir.Value]
    new: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict[ir.Value, ir.Value])
    """New values of the parameter and the state."""
    nodes: list[ir.Node] = dataclasses.field(default_factory=list[ir.Node])

    @property
    def inputs(self) -> list[ir.Value]:
        return [self.parameter, self.gradient, *self.slots.values()]


def _update_models(options: BuildOptions, groups: Sequence[_Group]) -> list[BuiltModel] | None:
    """Emit one update per group in one graph, and split it into models.

    Return ``None`` if the groups depend on each other.
    """
    op = _builder("all", options)
    controls = {n: op.input(n, dtype, [1]) for n, (_, dtype) in _SCALAR_INPUTS.items()}
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
        values = [new[v.group.name], *(new_state[f"{v.group.name}.{s}"] for s in v.slots)]
        op.graph.outputs.extend(op.Identity(y) for y in values)
    simplify(ir.Model(op.graph, ir_version=IR_VERSION))
    outputs = iter(op.graph.outputs)
    for v in vectors:
        v.new = {x: next(outputs) for x in (v.parameter, *v.slots.values())}
    scalar_nodes = _assign_nodes(op.graph, vectors)
    if scalar_nodes is None:
        return None
    scalars = _scalars_read(vectors, [*controls.values(), *_results(scalar_nodes)])
    return [
        _scalar_model(options, controls, scalar_nodes, scalars),
        *(_update_model(options, v, scalars, i) for i, v in enumerate(vectors)),
    ]


def _declare(op: OpBuilder, group: _Group) -> _GroupValues:
    parameter, gradient, *slots = (
        op.input(f"{group.name}/{key}", group.dtype, [_LENGTH])
        for key in ("parameter", "gradient", *group.slots)
    )
    return _GroupValues(group, parameter, gradient, dict(zip(group.slots, slots, strict=True)))


def _assign_nodes(graph: ir.Graph, vectors: Sequence[_GroupValues]) -> list[ir.Node] | None:
    """Assign each node to the group whose vectors it reads; return the nodes that read none.

    Return ``None`` if a node reads vectors of several groups or has a subgraph.
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


def _scalars_read(
    vectors: Sequence[_GroupValues], scalars: Sequence[ir.Value]
) -> dict[ir.Value, str]:
    """Return names for the scalars that updates read, in the order of their first use."""
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
) -> BuiltModel:
    """Return the model of the scalars that all updates of a step share."""
    signature = _signature("scalars", options)
    copies: dict[ir.Value, ir.Value] = {}
    for name, x in controls.items():
        if x.uses():
            role, dtype = _SCALAR_INPUTS[name]
            copies[x] = signature.input(name, role, dtype, [1])
    _copy_nodes_into(signature.op, nodes, copies)
    for x, name in scalars.items():
        signature.output(name, "scalar", copies[x])
    return signature.build(options.target)


def _update_model(
    options: BuildOptions, v: _GroupValues, scalars: Mapping[ir.Value, str], index: int
) -> BuiltModel:
    """Return the update model of one group."""
    signature = _signature("update", options)
    roles = {"parameter": "parameter", "gradient": "gradient", **dict.fromkeys(v.slots, "state")}
    copies = {
        x: signature.input(name, role, v.group.dtype, [_LENGTH])
        for (name, role), x in zip(roles.items(), v.inputs, strict=True)
    }
    read = {x for node in v.nodes for x in node.inputs}
    for x, name in scalars.items():
        if x in read:
            dims = signature.op.static(x) or ()
            copies[x] = signature.input(name, "scalar", x.dtype or v.group.dtype, dims)
    _copy_nodes_into(signature.op, v.nodes, copies)
    for old, new in v.new.items():
        role = "parameter" if old is v.parameter else "state"
        signature.output(f"{copies[old].name}.out", role, copies[new], copies[old])
    built = signature.build(options.target)
    file = built.spec.file if index == 0 else built.spec.file.replace(".onnx", f".{index}.onnx")
    spec = dataclasses.replace(built.spec, file=file, members=v.group.members)
    return dataclasses.replace(built, spec=spec)


def _builder(name: str, options: BuildOptions) -> OpBuilder:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    return OpBuilder(graph, "update/", target=options.target)


def _signature(role: str, options: BuildOptions) -> GraphSignature:
    op = _builder(role, options)
    return GraphSignature(role, ir.Model(op.graph, ir_version=IR_VERSION), op)


def _copy_nodes_into(
    op: OpBuilder, nodes: Sequence[ir.Node], copies: dict[ir.Value, ir.Value]
) -> None:
    """Append copies of nodes; ``copies`` maps values to their copies and is extended in place."""
    for node in nodes:
        inputs: list[ir.Value | None] = []
        for x in node.inputs:
            if x is not None and x not in copies:
                assert x.const_value is not None
                copies[x] = op.const(x.const_value.numpy())
            inputs.append(None if x is None else copies[x])
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes=list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
        )
        op.append(copy)
        copies.update(zip(node.outputs, copy.outputs, strict=True))


def gradient_graph(origin: DifferentiatedModel, options: BuildOptions) -> BuiltModel:
    """Return the gradient model; with fused SGD, some outputs are new parameters."""
    copy = origin.copy("gradients", options.target)
    signature = copy.signature
    signature.declare(copy.inputs, "input")
    signature.declare(copy.targets, "target")
    signature.declare(list(copy.parameters.values()), "parameter")
    signature.declare(list(copy.buffers.values()), "buffer")
    signature.declare(copy.rng, "rng")
    copy.report(copy.gradients if GRAD_NORM in options.metrics else None)
    for name, g in copy.gradients.items():
        signature.output(f"{name}_grad", "gradient", g)
    copy.declare_new_buffers()
    signature.optimize(options.target)
    if options.target.prefers("fuse-sgd-into-gemm"):
        gradients = dict(zip(copy.parameters, signature.outputs_of("gradient"), strict=True))
        fuse_sgd_update(signature, options, copy.parameters, gradients)
    return signature.finish(options.target)


def uses_plain_sgd(options: BuildOptions, name: str) -> bool:
    """Return whether the update of a parameter is just ``p - lr * gradient``."""
    plain = options.ema is None and options.clip.norm is None and options.clip.value is None
    return plain and options.optimizer.is_plain_sgd(name)


def fuse_sgd_update(
    signature: GraphSignature,
    options: BuildOptions,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
) -> None:
    """Replace gradient outputs by new parameters, where one node can compute both.

        before:  MatMul(a, b) -> grad              (then p - lr * grad in another model)
        after:   Gemm(a, -lr * b, p) -> p.out      (lr multiplies the smaller factor)

    ScatterND into zeros (the gradient of an embedding) scatters into the parameter likewise.

    Args:
        signature: the finished graph, changed in place.
        options: options of the build.
        parameters: inputs of the graph, by name.
        gradients: outputs of the graph, by the name of the parameter.
    """
    plain = [n for n in gradients if uses_plain_sgd(options, n)]
    fusable = {n: node for n in plain if (node := _fusable_gradient(gradients[n], parameters[n]))}
    if not fusable:
        return
    op, rates = signature.op, _LearningRates(signature, options)
    for name, node in fusable.items():
        new = node.emit(op, parameters[name], rates.negative(name, parameters[name]))
        _replace_gradient(signature, gradients[name], name, new, parameters[name])
    remaining = [n for n in gradients if n not in fusable]
    if len(remaining) <= T.FUSED_SGD_REMAINING_PARAMETERS and set(remaining) <= set(plain):
        for name in remaining:  # two nodes each are faster than running an update model
            p, g = parameters[name], gradients[name]
            new = op.Add(p, op.Mul(g, rates.negative(name, p)))
            _replace_gradient(signature, g, name, new, p)
    signature.remove_dead()


@dataclasses.dataclass(frozen=True)
class _FusableGradient:
    """The node that replaces the producer of a gradient and returns the new parameter."""

    operator: str
    inputs: tuple[ir.Value | None, ...]
    """Inputs of the new node; ``None`` is the parameter."""
    scaled: int
    """Index of the input that is multiplied by the learning rate."""
    attributes: tuple[ir.Attr, ...]

    def emit(self, op: OpBuilder, p: ir.Value, rate: ir.Value) -> ir.Value:
        inputs = [p if x is None else x for x in self.inputs]
        inputs[self.scaled] = op.Mul(inputs[self.scaled], rate)
        return op.append(
            ir.Node("", self.operator, inputs, attributes=self.attributes, version=op.opset)
        )


class _LearningRates:
    """Negative learning rates, each emitted once per dtype and ``lr_factor``."""

    def __init__(self, signature: GraphSignature, options: BuildOptions) -> None:
        self._op, self._optimizer = signature.op, options.optimizer
        self._lr = signature.input("learning_rate", "lr", ir.DataType.FLOAT, [1])
        self._known: dict[tuple[ir.DataType | None, float], ir.Value] = {}

    def negative(self, name: str, like: ir.Value) -> ir.Value:
        factor = self._optimizer.group_of(name).lr_factor
        key = (like.dtype, factor)
        if key not in self._known:
            op = self._op
            rate = op.cast(op.Reshape(self._lr, op.const([])), like.dtype)
            self._known[key] = op.Neg(rate if factor == 1.0 else op.Mul(rate, factor))
        return self._known[key]


def _exclusive_producer(gradient: ir.Value) -> ir.Node | None:
    """Return the node that computes a gradient, if nothing else reads its result."""
    node = gradient.producer()
    if node is None or gradient.uses():
        return None
    if node.op_type != "Identity":
        return node
    (x,) = node.inputs
    single_use = x is not None and len(x.uses()) == 1 and not x.is_graph_output()
    return x.producer() if x is not None and single_use else None


def _fusable_gradient(gradient: ir.Value, p: ir.Value) -> _FusableGradient | None:
    """Return the node that can compute the new parameter instead of the gradient, if any."""
    producer = _exclusive_producer(gradient)
    if producer is None:
        return None
    if _is_matmul(producer):
        assert p.shape is not None
        rows, columns = p.shape.numpy()
        smaller = 0 if rows <= columns else 1
        attributes = tuple(a for a in producer.attributes.values() if a.name != "beta")
        return _FusableGradient("Gemm", (*producer.inputs[:2], None), smaller, attributes)
    if _is_scatter_into_zeros(producer):
        attributes = tuple(producer.attributes.values())
        return _FusableGradient("ScatterND", (None, *producer.inputs[1:]), 2, attributes)
    return None


def _is_matmul(node: ir.Node) -> bool:
    if node.op_type == "Gemm":
        return len(node.inputs) == 2 or node.inputs[2] is None
    ranks = [None if x is None or x.shape is None else len(x.shape) for x in node.inputs]
    return node.op_type == "MatMul" and ranks == [2, 2]


def _is_scatter_into_zeros(node: ir.Node) -> bool:
    """Return whether a node adds rows to a tensor of zeros."""
    start = node.inputs[0].producer() if node.op_type == "ScatterND" and node.inputs[0] else None
    reduction = node.attributes.get("reduction")
    if start is None or start.op_type != "ConstantOfShape" or reduction is None:
        return False
    value = start.attributes.get("value")
    zeros = value is None or not value.as_tensor().numpy().any()
    return zeros and reduction.as_string() == "add"


def _replace_gradient(
    signature: GraphSignature, gradient: ir.Value, name: str, new: ir.Value, p: ir.Value
) -> None:
    new.shape, new.type = p.shape, p.type
    signature.replace_output(gradient, f"{name}.out", "parameter", new, p)


_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Identity", "Max", "Min", "Where"})
_UPDATE_ROLES = ("optimizer", "update")


def mark_in_place(spec: ModelSpec, graph: ir.Graph) -> ModelSpec:
    """Return the manifest entry of a model with the inputs that it may overwrite.

    Only models that update parameters have any, on targets where a caller can bind outputs.
    """
    if spec.role not in _UPDATE_ROLES or find(spec.target).lacks("output-binding"):
        return spec
    return dataclasses.replace(spec, in_place=overwritable_inputs(graph, spec))


def overwritable_inputs(graph: ir.Graph, spec: ModelSpec) -> tuple[str, ...]:
    """Return the inputs that may share memory with the outputs that replace them.

    This is safe if every node that reads the old value runs before the node that writes the new
    one, in any order the runtime may choose: it must be that node or one of its ancestors.
    """
    if any(True for node in graph for _ in subgraphs_of(node)):
        return ()  # a subgraph reads values that its node does not list as inputs
    inputs = {x.name: x for x in graph.inputs}
    outputs = {y.name: y for y in graph.outputs}
    return tuple(
        t.feeds
        for t in spec.outputs
        if t.feeds is not None and _may_overwrite(outputs[t.name], inputs[t.feeds])
    )


def _may_overwrite(new: ir.Value, old: ir.Value) -> bool:
    writer = new.producer()
    if writer is None:
        return False
    # If the writer reads the old value, it must be elementwise: it would overwrite its own input.
    if old in writer.inputs and writer.op_type not in _ELEMENTWISE:
        return False
    return all(_is_ancestor_of(node, writer) for node, _ in old.uses())


def _is_ancestor_of(node: ir.Node, last: ir.Node) -> bool:
    """Return whether a node is ``last`` or one of its ancestors.

    The search goes forward: an old parameter reaches few nodes, while with a global norm every node
    is an ancestor of every output.
    """
    reached, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current is last:
            return True
        readers = {use.node for y in current.outputs for use in y.uses()} - reached
        reached |= readers
        pending += readers
    return False
