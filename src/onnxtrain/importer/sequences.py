"""Replace sequences and optionals of known structure by tensors.

    SplitToSequence -> SequenceAt              becomes  Split
    SequenceConstruct -> ConcatFromSequence    becomes  Concat
    Loop that appends to a sequence            becomes  Loop with a scan output

Sequences that depend on decisions at run time stay; the gradient rules handle them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_nodes
from onnxtrain.graph.nodes import captured, is_op, is_standard, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify import remove_dead


@dataclasses.dataclass(frozen=True)
class KnownElements:
    """A sequence with a known number of tensors."""

    values: list[ir.Value]

    def at(self, op: OpBuilder, position: ir.Value) -> ir.Value | None:
        """Return one element; ``None`` if the index is dynamic and the shapes differ."""
        where = constant_integer(position)
        if where is not None:
            inside = -len(self.values) <= where < len(self.values)
            return self.values[where] if inside else None
        first = self.values[0] if self.values else None
        if first is None or not all(S.same_shape(x, first) for x in self.values):
            return None
        return op.Gather(self.joined(op, 0, new_axis=True), position, axis=0)

    def length(self, op: OpBuilder) -> ir.Value:
        """Return the number of elements as an int64 scalar."""
        return op.const(len(self.values))

    def joined(self, op: OpBuilder, axis: int, new_axis: bool) -> ir.Value | None:
        """Return the elements concatenated or stacked along an axis."""
        if not self.values:
            return None
        parts = [op.Unsqueeze(x, [axis]) for x in self.values] if new_axis else self.values
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@dataclasses.dataclass(frozen=True)
class TensorChunks:
    """A tensor split along an axis into a dynamic number of pieces."""

    x: ir.Value
    axis: int
    size: int | None
    """Size of a piece along the axis (the last may be smaller); ``None``: pieces lack the axis."""
    keepdims: bool

    def at(self, op: OpBuilder, position: ir.Value) -> ir.Value | None:
        """Return one piece."""
        if self.size is None:
            piece = op.Gather(self.x, position, axis=self.axis)
            return op.Unsqueeze(piece, [self.axis]) if self.keepdims else piece
        where = constant_integer(position)
        if where is not None and where >= 0:
            ends = [self.size * where, self.size * (where + 1)]
            return op.Slice(self.x, ends[:1], ends[1:], [self.axis])
        line = op.Reshape(op.cast(position, ir.DataType.INT64), [1])
        line = op.Where(op.Less(line, 0), op.Add(line, op.Unsqueeze(self.length(op), [0])), line)
        start = op.Mul(line, self.size)
        return op.Slice(self.x, start, op.Add(start, self.size), [self.axis])

    def length(self, op: OpBuilder) -> ir.Value:
        """Return the number of pieces as an int64 scalar."""
        total = op.vector([op.size(self.x, self.axis)])
        if self.size is not None and self.size > 1:
            total = op.Div(op.Add(total, self.size - 1), self.size)
        return op.Squeeze(total, [0])

    def joined(self, op: OpBuilder, axis: int, new_axis: bool) -> ir.Value | None:
        """Return the pieces concatenated or stacked; ``None`` for unsupported combinations."""
        rank = op.rank(self.x)
        if self.keepdims:
            return self.x if not new_axis and axis % rank == self.axis else None
        if new_axis:
            return op.move_axis(self.x, self.axis, axis)
        axis %= rank - 1
        x = op.move_axis(self.x, self.axis, axis)
        sizes = [op.size(x, a) for a in range(rank)]
        dims = op.dims(x)
        merged = D.mul(dims[axis], dims[axis + 1])
        merged = merged if isinstance(merged, int) else -1
        return op.reshape(x, [*sizes[:axis], merged, *sizes[axis + 2 :]])


Sequence = KnownElements | TensorChunks


def constant_integer(x: ir.Value | None) -> int | None:
    """Return the value of a constant integer, ``None`` if it is computed or absent."""
    array = S.constant_of(x)
    return None if array is None or array.size != 1 else int(array.reshape(-1)[0])


def appends_to_scan_outputs(
    op: OpBuilder, node: ir.Node, empty: set[ir.Value]
) -> tuple[ir.Node, dict[ir.Value, ir.Value]]:
    """Replace carried sequences that a Loop only appends to by scan outputs.

    All elements of such a sequence must have the same shape.

    Args:
        op: a builder that inserts nodes before the Loop.
        node: the Loop.
        empty: sequences known to be empty.

    Returns:
        The Loop (a new node if it changed), and for each replaced sequence the value that
        represents it, with its stacked elements.
    """
    body, outer = node.attributes["body"].as_graph(), _outer_symbols(node)
    chosen = {
        i: element
        for i in range(2, len(node.inputs))
        if node.inputs[i] in empty and (element := _appended_element(node, body, i)) is not None
    }
    if not chosen:
        return node, {}
    inner = OpBuilder(body, op.prefix, parent=op)
    scans = [inner.Identity(element) for element in chosen.values()]
    for i in sorted(chosen, reverse=True):
        append = body.outputs.pop(i - 1).producer()
        assert append is not None
        body.remove(append, safe=True)
        body.inputs.pop(i)
    body.outputs.extend(scans)
    kept = [i for i in range(len(node.outputs)) if i + 2 not in chosen]
    missing = len(body.outputs) - 1 - len(kept) - len(scans)  # omitted trailing outputs
    loop = ir.Node(
        "",
        "Loop",
        [x for i, x in enumerate(node.inputs) if i not in chosen],
        attributes=[ir.AttrGraph("body", body)],
        num_outputs=len(kept) + missing + len(scans),
        version=node.version,
        name=node.name,
    )
    assert node.graph is not None
    node.attributes.pop("body")
    node.graph.insert_before(node, loop)
    for old, new in zip((node.outputs[i] for i in kept), loop.outputs, strict=False):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = op.names.fresh(f"{old.name}.replaced") if old.name else old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    for out in loop.outputs[len(kept) :]:
        out.name = op.names.fresh(f"{op.prefix}{node.op_type}.stack")
    stacks: dict[ir.Value, ir.Value] = {}
    for i, element, stack in zip(chosen, scans, loop.outputs[-len(scans) :], strict=True):
        stack.type = element.type
        known = [None if D.symbols(d) - outer else d for d in S.dims_of(element) or ()]
        names = [D.symbol(f"{stack.name}.{k}") for k in range(len(known) + 1)]
        sizes = [b if a is None else a for a, b in zip(known, names[1:], strict=True)]
        S.set_dims(stack, [names[0], *sizes])
        old, new = node.outputs[i - 2], op.SplitToSequence(stack, axis=0, keepdims=0)
        if old.is_graph_output():
            name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
            new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        stacks[new] = stack
    node.graph.remove(node, safe=True)
    return loop, stacks


def _outer_symbols(node: ir.Node) -> set[str]:
    """Return the symbolic dimensions that are the same inside and outside of a Loop."""
    return {
        symbol
        for x in (*node.inputs, *captured(node))
        if x is not None
        for d in S.dims_of(x) or ()
        for symbol in D.symbols(d)
    }


def _appended_element(node: ir.Node, body: ir.Graph, i: int) -> ir.Value | None:
    """Return the element that each step appends to a carried sequence, if it only appends."""
    before, after = body.inputs[i], body.outputs[i - 1]
    append = after.producer()
    if append is None or append.op_type != "SequenceInsert" or append.graph is not body:
        return None
    at_end = len(append.inputs) < 3 or append.inputs[2] is None
    if append.inputs[0] is not before or not at_end:
        return None
    if len(before.uses()) != 1 or after.uses() or list(body.outputs).count(after) != 1:
        return None
    element = append.inputs[1]
    assert element is not None
    dims, outer = S.dims_of(element), _outer_symbols(node)
    fixed = dims is not None and all(
        dims[k] is not None and D.symbols(dims[k]) <= outer
        for k in _varying_axes(node.outputs[i - 2], len(dims))
    )
    return element if fixed else None


def _varying_axes(sequence: ir.Value, rank: int) -> list[int]:
    """Return the axes along which the elements of a sequence may differ.

    Concatenation requires equal sizes along all other axes.
    """
    uses = list(sequence.uses())
    if sequence.is_graph_output() or any(use.node.op_type != "ConcatFromSequence" for use in uses):
        return list(range(rank))
    free = set()
    for use in uses:
        new_axis = use.node.attributes.get("new_axis")
        if new_axis is None or not new_axis.as_int():
            free.add(use.node.attributes["axis"].as_int() % rank if rank else 0)
    return sorted(free) if rank else []


_MAX_PIECES = 1024  # outputs of one Split; with more, the sequence stays symbolic (TensorChunks)
_MAX_COPIES = 16384  # nodes that an unrolled SequenceMap may have


def resolve_sequences(model: ir.Model) -> list[str]:
    """Replace sequences of known structure by tensors, in place; return lines for the report.

    Types must be inferred. Infer shapes again afterwards.
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
        """Replace the output of a node by ``new``; ``None`` leaves the node unchanged."""
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
        empty = {x for x, s in self.known.items() if isinstance(s, KnownElements) and not s.values}
        new, stacks = appends_to_scan_outputs(op, node, empty)
        for sequence, stack in stacks.items():
            self.known[sequence] = TensorChunks(stack, axis=0, size=None, keepdims=False)
            self.done += 1
        return new


_Handler = Callable[[_Resolver, OpBuilder, ir.Node], None]
_HANDLERS: dict[str, _Handler] = {}


def _handler(op_type: str) -> Callable[[_Handler], _Handler]:
    def register(function: _Handler) -> _Handler:
        _HANDLERS[op_type] = function
        return function

    return register


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


@_handler("SequenceEmpty")
@_handler("SequenceConstruct")
def _construct(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    work.known[node.outputs[0]] = KnownElements([x for x in node.inputs if x is not None])


@_handler("Identity")
def _identity(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, x = work.sequence(node.inputs[0]), node.inputs[0]
    if sequence is not None:
        work.known[node.outputs[0]] = sequence
    if x in work.optional:
        work.optional[node.outputs[0]] = work.optional[x]


@_handler("SequenceInsert")
def _insert(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, element, position = work.sequence(node.inputs[0]), node.inputs[1], _input(node, 2)
    at = constant_integer(position)
    if (
        not isinstance(sequence, KnownElements)
        or element is None
        or (position is not None and at is None)
    ):
        return
    values = list(sequence.values)
    values.insert(len(values) if at is None else at, element)
    work.known[node.outputs[0]] = KnownElements(values)


@_handler("SequenceErase")
def _erase(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, position = work.sequence(node.inputs[0]), _input(node, 1)
    at = -1 if position is None else constant_integer(position)
    if (
        isinstance(sequence, KnownElements)
        and at is not None
        and -len(sequence.values) <= at < len(sequence.values)
    ):
        values = list(sequence.values)
        del values[at]
        work.known[node.outputs[0]] = KnownElements(values)


@_handler("SplitToSequence")
def _split(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    x, split = node.inputs[0], _input(node, 1)
    if x is None or x.shape is None:
        return
    attributes = S.attributes_of(node, op.opset)
    axis = attributes["axis"] % len(x.shape)
    keepdims = split is not None or bool(attributes["keepdims"])
    size = 1 if split is None else constant_integer(split) if _rank(split) == 0 else None
    total = (S.dims_of(x) or ())[axis]
    sizes: ir.Value | None = None
    if split is not None and _rank(split) == 1:
        count = (S.dims_of(split) or (None,))[0]
        if not isinstance(count, int) or count > _MAX_PIECES:
            return
        sizes = op.cast(split, ir.DataType.INT64)
    elif size is not None and size < 1:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: pieces of size {size}\n"
            "hint: the split must be positive"
        )
    elif size is not None and isinstance(total, int) and total <= size * _MAX_PIECES:
        lengths = [min(size, total - at) for at in range(0, total, size)]
        count, sizes = len(lengths), op.const(lengths) if lengths else None
    else:
        if split is None or size is not None:
            step = None if split is None else size
            work.known[node.outputs[0]] = TensorChunks(x, axis=axis, size=step, keepdims=keepdims)
        return
    if not count:
        work.known[node.outputs[0]] = KnownElements([])
        return
    parts = [x] if count == 1 else list(op.Split(x, sizes, axis=axis, _outputs=count))
    if not keepdims:
        parts = [op.Squeeze(p, [axis]) for p in parts]
    work.known[node.outputs[0]] = KnownElements(parts)


@_handler("SequenceAt")
def _at(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence, position = work.sequence(node.inputs[0]), node.inputs[1]
    if sequence is not None and position is not None:
        work.replace(op, node, sequence.at(op, position))


@_handler("SequenceLength")
def _length(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence = work.sequence(node.inputs[0])
    if sequence is not None:
        work.replace(op, node, sequence.length(op))


@_handler("ConcatFromSequence")
def _concat(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sequence = work.sequence(node.inputs[0])
    if sequence is not None:
        attributes = S.attributes_of(node, op.opset)
        work.replace(
            op, node, sequence.joined(op, attributes["axis"], bool(attributes["new_axis"]))
        )


@_handler("SequenceMap")
def _map(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    sources: list[KnownElements | ir.Value] = []
    for x in node.inputs:
        assert x is not None
        source = work.sequence(x) if isinstance(x.type, ir.SequenceType) else x
        if not isinstance(source, KnownElements | ir.Value):
            return
        sources.append(source)
    lists = [s.values for s in sources if isinstance(s, KnownElements)]
    if len({len(values) for values in lists}) != 1:
        return
    body = node.attributes["body"].as_graph()
    if any(True for inner in body for _ in subgraphs_of(inner)):
        return
    if len(lists[0]) * len(body) > _MAX_COPIES:
        return
    made: list[list[ir.Value]] = [[] for _ in node.outputs]
    for i in range(len(lists[0])):
        given = [s.values[i] if isinstance(s, KnownElements) else s for s in sources]
        mapping: dict[ir.Value, ir.Value] = dict(zip(body.inputs, given, strict=True))
        outputs = copy_nodes(op, body, mapping)
        # A dimension has one name in the body, but its size differs from step to step.
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
        work.known[y] = KnownElements(values)
    work.done += 1


@_handler("Optional")
def _optional(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    work.optional[node.outputs[0]] = _input(node, 0)


@_handler("OptionalGetElement")
def _element(work: _Resolver, op: OpBuilder, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is None:
        return
    element = work.optional.get(x) if isinstance(x.type, ir.OptionalType) else x
    if element in work.known:
        work.known[node.outputs[0]] = work.known[element]
    work.replace(op, node, element)


@_handler("OptionalHasElement")
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
