"""Sequences and optionals whose structure is known become plain tensors.

``SplitToSequence -> SequenceAt`` turns into ``Split``, ``SequenceConstruct ->
ConcatFromSequence`` into ``Concat``, a Loop that appends to a sequence into one with a scan output,
and so on. Sequences that depend on run-time decisions stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_op, is_standard
from onnxtrain.graph.prepare.known_sequences import Chunks, Items, Sequence, scalar_of
from onnxtrain.graph.prepare.loop_sequences import as_scan_outputs
from onnxtrain.graph.simplify import remove_dead

_PIECES = 1024  # of a split that become outputs of one node; of more, only the rule is kept
_COPIES = 16384  # nodes that a mapped body may become


def resolve_sequences(model: ir.Model) -> list[str]:
    """Rewrite sequences of known structure, in place; say in words what was done.

    Types must have been inferred; shapes of what was rewritten should be inferred again.
    """
    if not any(n.op_type in _HANDLERS and is_standard(n) for n in model.graph.all_nodes()):
        return []
    work = _Resolver(OpBuilder(model.graph, prefix="prepare/"))
    work.walk(model.graph)
    if not work.done:
        return []
    remove_dead(model)
    return [f"sequences: {work.done} node(s) rewritten into tensor operators"]


class _Resolver:
    """Follows sequences and optionals through a graph and its subgraphs."""

    def __init__(self, root: OpBuilder) -> None:
        self.root = root
        self.known: dict[ir.Value, Sequence] = {}
        self.optional: dict[ir.Value, ir.Value | None] = {}
        self.done = 0

    def walk(self, graph: ir.Graph) -> None:
        for node in list(graph):
            op = OpBuilder(graph, self.root.prefix, before=node, parent=self.root)
            if is_op(node, "Loop"):
                node = self._loop(op, node)
            for body in subgraphs_of(node):
                self.walk(body)
            handler = _HANDLERS.get(node.op_type) if node.domain == "" else None
            if handler is not None:
                handler(self, op, node)

    def sequence(self, x: ir.Value | None) -> Sequence | None:
        return None if x is None else self.known.get(x)

    def replace(self, op: OpBuilder, node: ir.Node, new: ir.Value | None) -> None:
        """Let ``new`` stand for the node's output; ``None`` leaves the node as it is."""
        if new is None:
            return
        old = node.outputs[0]
        if old.is_graph_output():
            name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
            new = _named(op.Identity(new), name)
        if new.shape is None:
            new.shape = old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        self.done += 1

    def _loop(self, op: OpBuilder, node: ir.Node) -> ir.Node:
        empty = {x for x, s in self.known.items() if isinstance(s, Items) and not s.values}
        new, stacks = as_scan_outputs(op, node, empty)
        for sequence, stack in stacks.items():
            self.known[sequence] = Chunks(stack, axis=0, size=None, keepdims=False)
            self.done += 1
        return new


_Handler = Callable[[_Resolver, OpBuilder, ir.Node], None]
_HANDLERS: dict[str, _Handler] = {}


def _handle(op_type: str) -> Callable[[_Handler], _Handler]:
    def register(function: _Handler) -> _Handler:
        _HANDLERS[op_type] = function
        return function

    return register


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


@_handle("SequenceEmpty")
@_handle("SequenceConstruct")
def _construct(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    work.known[node.outputs[0]] = Items([x for x in node.inputs if x is not None])


@_handle("Identity")
def _identity(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, x = work.sequence(node.inputs[0]), node.inputs[0]
    if sequence is not None:
        work.known[node.outputs[0]] = sequence
    if x in work.optional:
        work.optional[node.outputs[0]] = work.optional[x]


@_handle("SequenceInsert")
def _insert(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, element, position = work.sequence(node.inputs[0]), node.inputs[1], _input(node, 2)
    at = scalar_of(position)
    if not isinstance(sequence, Items) or element is None or (position is not None and at is None):
        return
    values = list(sequence.values)
    values.insert(len(values) if at is None else at, element)
    work.known[node.outputs[0]] = Items(values)


@_handle("SequenceErase")
def _erase(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, position = work.sequence(node.inputs[0]), _input(node, 1)
    at = -1 if position is None else scalar_of(position)
    if (
        isinstance(sequence, Items)
        and at is not None
        and -len(sequence.values) <= at < len(sequence.values)
    ):
        values = list(sequence.values)
        del values[at]
        work.known[node.outputs[0]] = Items(values)


@_handle("SplitToSequence")
def _split(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    x, split = node.inputs[0], _input(node, 1)
    if x is None or x.shape is None:
        return
    attributes = S.attributes_of(node, op.opset)
    axis = attributes["axis"] % len(x.shape)
    keepdims = split is not None or bool(attributes["keepdims"])
    size = 1 if split is None else scalar_of(split) if _rank(split) == 0 else None
    total = (S.dims_of(x) or ())[axis]
    sizes: ir.Value | None = None
    if split is not None and _rank(split) == 1:
        count = (S.dims_of(split) or (None,))[0]
        if not isinstance(count, int) or count > _PIECES:
            return
        sizes = op.cast(split, ir.DataType.INT64)
    elif size is not None and size < 1:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: pieces of size {size}\n"
            "hint: the split must be positive"
        )
    elif size is not None and isinstance(total, int) and total <= size * _PIECES:
        lengths = [min(size, total - at) for at in range(0, total, size)]
        count, sizes = len(lengths), op.const(lengths) if lengths else None
    else:
        if split is None or size is not None:
            step = None if split is None else size
            work.known[node.outputs[0]] = Chunks(x, axis=axis, size=step, keepdims=keepdims)
        return
    if not count:
        work.known[node.outputs[0]] = Items([])
        return
    parts = [x] if count == 1 else list(op.Split(x, sizes, axis=axis, _outputs=count))
    if not keepdims:
        parts = [op.Squeeze(p, [axis]) for p in parts]
    work.known[node.outputs[0]] = Items(parts)


@_handle("SequenceAt")
def _at(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, position = work.sequence(node.inputs[0]), node.inputs[1]
    if sequence is not None and position is not None:
        work.replace(op, node, sequence.at(op, position))


@_handle("SequenceLength")
def _length(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence = work.sequence(node.inputs[0])
    if sequence is not None:
        work.replace(op, node, sequence.length(op))


@_handle("ConcatFromSequence")
def _concat(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence = work.sequence(node.inputs[0])
    if sequence is not None:
        attributes = S.attributes_of(node, op.opset)
        work.replace(
            op, node, sequence.joined(op, attributes["axis"], bool(attributes["new_axis"]))
        )


@_handle("SequenceMap")
def _map(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sources: list[Items | ir.Value] = []
    for x in node.inputs:
        assert x is not None
        source = work.sequence(x) if isinstance(x.type, ir.SequenceType) else x
        if not isinstance(source, Items | ir.Value):
            return
        sources.append(source)
    lists = [s.values for s in sources if isinstance(s, Items)]
    if len({len(values) for values in lists}) != 1:
        return
    body = node.attributes["body"].as_graph()
    if any(True for inner in body for _ in subgraphs_of(inner)):
        return
    if len(lists[0]) * len(body) > _COPIES:
        return
    made: list[list[ir.Value]] = [[] for _ in node.outputs]
    for i in range(len(lists[0])):
        given = [s.values[i] if isinstance(s, Items) else s for s in sources]
        mapping: dict[ir.Value, ir.Value] = dict(zip(body.inputs, given, strict=True))
        outputs = copy_nodes(op, body, mapping)
        # Sizes have one name in the body, but differ from step to step.
        for inner in body:
            for y in inner.outputs:
                mapping[y].shape = None
                mapping[y].meta.clear()
            copy = mapping[inner.outputs[0]].producer()
            assert copy is not None
            S.infer_node(copy, op.opset)
        for values, y in zip(made, outputs, strict=True):
            values.append(y)
    for y, values in zip(node.outputs, made, strict=True):
        work.known[y] = Items(values)
    work.done += 1


@_handle("Optional")
def _optional(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    work.optional[node.outputs[0]] = _input(node, 0)


@_handle("OptionalGetElement")
def _element(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is None:
        return
    element = work.optional.get(x) if isinstance(x.type, ir.OptionalType) else x
    if element in work.known:
        work.known[node.outputs[0]] = work.known[element]
    work.replace(op, node, element)


@_handle("OptionalHasElement")
def _has_element(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    x = _input(node, 0)
    if x is None or not isinstance(x.type, ir.OptionalType):
        work.replace(op, node, op.const(x is not None))
    elif x in work.optional:
        work.replace(op, node, op.const(work.optional[x] is not None))


def _named(x: ir.Value, name: str | None) -> ir.Value:
    x.name = name
    return x


def _rank(x: ir.Value) -> int | None:
    return None if x.shape is None else len(x.shape)
