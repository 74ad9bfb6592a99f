"""Replace nodes that a target cannot express, by expansions or ONNX function bodies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import LoweringError, OnnxTrainError
from onnxtrain.expand.expansions import Function, apply_lowering, lowerings
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard, subgraphs_of
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer.functions import context_dependent_body, has_body
from onnxtrain.lowering.folding import folded, remove_inference_no_ops
from onnxtrain.lowering.profile import LoweringTarget, max_rank_of
from onnxtrain.lowering.types import legalize_types, reduce_rank


def expand_function_body(
    op: OpBuilder, *inputs: ir.Value | None, node: ir.Node
) -> list[ir.Value | None] | None:
    """Return the outputs of a node's ONNX function body, ``None`` if it has none."""
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
            return None  # bodies with control flow are not expanded
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
    return context_dependent_body(ir.serde.serialize_node(node), types, op.opset)


_MAX_DEPTH = 16  # of nested expansions
_MAX_REPORTED = 8  # nodes in an error message


class _NoLoweringError(Exception):
    """A node that no expansion brings to the target, with the reasons."""

    def __init__(self, node: ir.Node, reasons: list[str]) -> None:
        super().__init__(node.name)
        self.node = node
        self.reasons = reasons


class _Emitter(OpBuilder):
    """A builder that records its nodes and folds those that are constant."""

    def __init__(
        self, root: OpBuilder, before: ir.Node, made: list[ir.Node], weights: frozenset[str]
    ) -> None:
        assert isinstance(before.graph, ir.Graph)
        super().__init__(before.graph, root.prefix, target="portable", before=before, parent=root)
        self.made = made
        self.weights = weights

    def append(self, node: ir.Node) -> Any:
        emitted = super().append(node)
        array = folded(node, self.opset, self.weights)
        if array is not None:
            self.graph.remove(node, safe=True)
            return self.const(array, emitted.dtype)
        self.made.append(node)
        return emitted


def replace_unsupported(
    model: ir.Model, target: LoweringTarget, weights: frozenset[str]
) -> Counter[str]:
    """Expand every node that the target cannot express, in place; return counts by operator.

    Nodes that depend on constants only are folded; ``weights`` do not count as constants.

    Raises:
        LoweringError: if nodes cannot be lowered, with their names and the reasons.
    """
    engine = _Replacer(OpBuilder(model.graph, prefix="lower/"), target, weights)
    engine.graph(model.graph)
    if engine.stuck:  # nodes that became dead are not missed
        remove_inference_no_ops(model)
        simplify(model)
        engine.stuck = [
            one
            for one in engine.stuck
            if one.node.graph is not None and target.obstacle(one.node) is not None
        ]
    if engine.stuck:
        raise LoweringError(_message(engine.stuck, target))
    return engine.done


class _Replacer:
    def __init__(self, root: OpBuilder, target: LoweringTarget, weights: frozenset[str]) -> None:
        self.root = root
        self.weights = weights
        self.target = target
        self.done: Counter[str] = Counter()
        self.stuck: list[_NoLoweringError] = []
        self.created: list[ir.Node] = []
        self.moved: dict[ir.Value, ir.Value] = {}
        self.adapting: tuple[Function, ...] = (self._in_other_types, self._flattened)

    def graph(self, graph: ir.Graph) -> None:
        for node in list(graph):
            try:
                self.node(node, ())
            except _NoLoweringError as stuck:
                self.stuck.append(_NoLoweringError(node, stuck.reasons))
                continue
            if node.graph is not None:  # the node stays, with its bodies
                for body in subgraphs_of(node):
                    self.graph(body)

    def node(self, node: ir.Node, chain: tuple[Function, ...]) -> None:
        why = self.target.obstacle(node)
        if why is None:
            return
        reasons = [why]
        choices: list[Function] = [
            *(self._constant, *self.adapting),
            *(*lowerings(node.op_type), expand_function_body),
        ]
        for rule in choices if len(chain) < _MAX_DEPTH else ():
            # An expansion may emit its own operator in an easier form; bound the recursion.
            if chain.count(rule) > 2:
                continue
            mark = len(self.created)
            try:
                values = self._try(rule, node, chain)
            except (_NoLoweringError, OnnxTrainError) as error:
                self._undo(mark)
                reasons += _reasons(error)
                continue
            if values is None:
                self._undo(mark)
                continue
            self._replace(node, values, top=not chain)
            if not chain:
                self.done[node.op_type] += 1
            return
        raise _NoLoweringError(node, list(dict.fromkeys(reasons)))

    def _constant(self, op: OpBuilder, *inputs: ir.Value | None, node: ir.Node) -> Any:
        """Return the constant that a node computes (a graph output, which folding skips)."""
        array = folded(node, op.opset, self.weights)
        return None if array is None else op.const(array, node.outputs[0].dtype)

    def _in_other_types(self, op: OpBuilder, *inputs: ir.Value | None, node: ir.Node) -> Any:
        profile = self.target.profile
        return None if profile is None else legalize_types(op, node, profile)

    def _flattened(self, op: OpBuilder, *inputs: ir.Value | None, node: ir.Node) -> Any:
        profile = self.target.profile
        limit = None if profile is None else max_rank_of(profile, node.op_type)
        return None if limit is None else reduce_rank(op, node, limit)

    def _try(
        self, rule: Function, node: ir.Node, chain: tuple[Function, ...]
    ) -> list[ir.Value | None] | None:
        made: list[ir.Node] = []
        try:
            replacements = apply_lowering(rule, _Emitter(self.root, node, made, self.weights), node)
        finally:
            self.created += made
        if replacements is None:
            return None
        wanted = [
            i for i, y in enumerate(node.outputs) if y.name and (y.uses() or y.is_graph_output())
        ]
        if any(i >= len(replacements) or replacements[i] is None for i in wanted):
            raise LoweringError(f"output {node.outputs[wanted[-1]].name!r} cannot be expressed")
        late: list[_NoLoweringError] = []
        for new in made:
            if new.op_type in ("Cast", "Reshape") and rule in self.adapting:
                # It usually cancels with the inverse one of a neighbour; checked again at the end.
                why = self.target.obstacle(new)
                self.stuck += [] if why is None else [_NoLoweringError(new, [why])]
                continue
            for body in subgraphs_of(new):
                for inner in list(body):
                    self.node(inner, (*chain, rule))
            try:
                self.node(new, (*chain, rule))
            except _NoLoweringError as stuck:
                # A boolean may become dead once its readers are expanded without it.
                if not all(y.dtype == ir.DataType.BOOL for y in new.outputs):
                    raise
                late.append(_NoLoweringError(new, stuck.reasons))
        values = [self._now(v) for v in replacements]
        if late:
            _remove_unread(made, values)
        for stuck in late:
            if stuck.node.graph is not None:
                raise stuck
        for i in wanted:
            source = values[i].producer()  # pyright: ignore[reportOptionalMemberAccess]
            assert source is None or source.graph is not None, "a removed node is still in use"
        return values

    def _now(self, value: ir.Value | None) -> ir.Value | None:
        while value in self.moved:
            value = self.moved[value]
        return value

    def _replace(self, node: ir.Node, values: list[ir.Value | None], *, top: bool) -> None:
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        mine = set(self.created)
        for i, old in enumerate(node.outputs):
            new = values[i] if i < len(values) else None
            # The result of an outer expansion has no uses yet.
            if (
                not old.name
                or new is None
                or (top and not old.uses() and not old.is_graph_output())
            ):
                continue
            fresh = new.producer() in mine and not new.is_graph_output() and top
            fresh = fresh and all(new is not v for v in values[:i])
            if old.is_graph_output() and not fresh:
                plain = OpBuilder(graph, self.root.prefix, before=node, parent=self.root)
                new = plain.Identity(new)
                fresh = True
            if fresh:  # the replacement takes over the name
                name, old.name = old.name, self.root.names.fresh(f"{old.name}.replaced")
                new.name = name
            if new.type is None:
                new.type = old.type
            if fresh or not S.is_static(new):
                new.shape = old.shape if old.shape is not None else new.shape
            for key, known in old.meta.items():  # sizes that are known by name
                new.meta.setdefault(key, known)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            self.moved[old] = new
        graph.remove(node, safe=True)
        if top:
            self.created.clear()
            self.moved.clear()

    def _undo(self, mark: int) -> None:
        """Remove what was made since ``mark``."""
        made, self.created = self.created[mark:], self.created[:mark]
        by_graph: dict[ir.Graph, list[ir.Node]] = {}
        for node in made:
            for y in node.outputs:  # also nodes of bodies read it, even of unfinished ones
                for use in list(y.uses()):
                    use.node.replace_input_with(use.idx, None)
            if isinstance(node.graph, ir.Graph):
                by_graph.setdefault(node.graph, []).append(node)
        for graph, nodes in by_graph.items():
            graph.remove(nodes, safe=True)


def _remove_unread(nodes: list[ir.Node], wanted: list[ir.Value | None]) -> None:
    for node in reversed(nodes):
        graph = node.graph
        if graph is not None and not any(y.uses() or y in wanted for y in node.outputs):
            graph.remove(node, safe=True)


def _reasons(error: Exception) -> list[str]:
    if isinstance(error, _NoLoweringError):
        return error.reasons
    return [str(error).splitlines()[0]]


def _message(stuck: list[_NoLoweringError], target: LoweringTarget) -> str:
    lines = [f"{len(stuck)} node(s) cannot be lowered to {target.title}"]
    for one in stuck[:_MAX_REPORTED]:
        lines.append(f"  node {one.node.name!r}: {S.describe(one.node)}")
        lines += [f"    {reason}" for reason in one.reasons[:4]]
    if len(stuck) > _MAX_REPORTED:
        lines.append(f"  and {len(stuck) - _MAX_REPORTED} more")
    dynamic = any(
        not S.is_static(x) for s in stuck for x in s.node.inputs if x is not None and x.shape
    )
    if dynamic and target.sizes:
        lines.append(
            f"hint: fix the symbolic sizes, e.g. --dim {target.sizes[0]}=1, or choose a newer opset"
        )
    else:
        lines.append("hint: choose a newer opset or another profile")
    return "\n".join(lines)
