"""Batch and sequence joined to one axis of rows, for as long as nothing tells them apart.

A product with a matrix, a sum along the last axis and what works on elements give the same for
``[batch, length, width]`` and for ``[batch * length, width]``. The gradients of weights need the
second, so a model of the first has a Reshape on both sides of each product, and turns weights that
are stored ``[out, in]``, which a Gemm reads as they lie. Regions of such nodes are turned as a
whole, where that saves nodes: the numbers are the same, and views remain at the borders only.

Axes that a broadcast treats alike, joined to one.

``[8, 12, 512, 512] - [8, 12, 512, 1]`` is ``[49152, 512] - [49152, 1]`` by elements. CUDA has a
kernel for a right operand with one axis that is not 1, which runs as fast as memory allows; the one
for any broadcast divides by the size of each axis for each element. Views cost nothing, and nodes
between two that are joined alike are joined with them, so that none is needed there.

What moves elements between two casts, in the short type.

``short(move(wide(x))) = move(x)`` for a number ``x`` of the short type, which a cast to float32 and
back leaves as it is. Such pairs are left where an operator between them is gone: two passes less,
and half the bytes for what is transposed.

What is cut out of a tensor twice is cut out once, and a cut that takes all is none.

Exporters write ``x[0::2, 0::2]`` and ``x[0::2, 1::2]`` as two cuts each, of which the first ones
are equal. Shared, the gradients of all pieces lie side by side and are put together in two steps;
apart, each piece would be padded with zeros to the whole and added.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size, copy_node, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes

_ROWWISE = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Clip", "Cos", "Div", "Equal", "Erf", "Exp", "Gelu"),
        *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg"),
        *("Not", "Or", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sign", "Sin", "Softplus"),
        *("Sqrt", "Sub", "Tanh", "Where"),
    }
)
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"})
_ALONG_LAST = frozenset({"LayerNormalization", "LogSoftmax", "Softmax"})

_GEMM_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})

_MAX_QUERIED_SIZES = 3
"""Nodes that tell a view both sizes, if neither is a number."""

Lead = tuple[Dim, Dim]
"""The sizes of the two axes that are joined."""


def flatten_batch_dims(model: ir.Model, op: OpBuilder) -> int:
    """Join axes where that leaves fewer nodes; return in how many regions."""
    fed = {d for x in model.graph.inputs for d in S.dims_of(x) or () if isinstance(d, str)}
    return sum(
        _flatten_region(op, region) for region in _regions(model.graph, fed) if region.saved() > 0
    )


@dataclasses.dataclass(eq=False)
class _Region:
    """Nodes that pass rows on to each other; ``lead`` are the axes that hold the rows."""

    lead: Lead
    nodes: list[ir.Node]

    def made(self) -> list[ir.Value]:
        """Return the values of rows that the nodes make."""
        return [y for n in self.nodes for y in n.outputs if _lead(y) == self.lead]

    def taken(self) -> list[ir.Value]:
        """Return the values of rows that come from elsewhere."""
        own = set(self.nodes)
        read = (x for n in self.nodes for x in _rows_of(n, self.lead))
        return list(dict.fromkeys(x for x in read if x.producer() not in own))

    def saved(self) -> int:
        """Return how many nodes less there are afterwards."""
        own, made, taken = set(self.nodes), self.made(), self.taken()
        views = sum(_is_flat(n) for v in (*made, *taken) for n, i in v.uses() if i == 0)
        turned = {n.inputs[1]: None for n in self.nodes if _is_turned(n)}
        views += sum(all(n in own for n, _ in w.uses()) for w in turned if w is not None)
        left = [y for y in made if any(not _follows(n, i, own) for n, i in y.uses())]
        ends = {*left, *(y for y in made if y.is_graph_output())}
        return (
            views
            - len(ends)
            - len(taken)
            - (0 if _has_at_most_one_symbol(self.lead) else _MAX_QUERIED_SIZES)
        )


def _flatten_region(op: OpBuilder, region: _Region) -> int:
    """Join the axes of a region, in place."""
    own, lead = set(region.nodes), region.lead
    made, taken = region.made(), region.taken()
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    first = order[0]
    for x in taken:
        producer = x.producer()
        op.position = first if producer is None else following[producer]
        uses = [(n, i) for n, i in x.uses() if n in own and x in _rows_of(n, lead)]
        flat = op.Reshape(x, [-1, _width(x)])
        _set_rows(flat, lead, _width(x))
        for node, index in uses:
            node.replace_input_with(index, flat)
        _share_shape(flat)
    for node in region.nodes:
        _adapt_node(node, op)
    products = [n for n in region.nodes if _is_turned(n)]
    for y in made:
        width, dims = _width(y), y.shape
        outside = [(n, i) for n, i in y.uses() if not _follows(n, i, own)]
        views = [n for n, i in y.uses() if _follows(n, i, own) and n not in own]
        producer = y.producer()
        assert producer is not None
        if outside or y.is_graph_output():
            op.position = following[producer]
            assert isinstance(width, int)
            back = op.reshape(y, [*_lead_sizes(op, lead), width])
            back.shape = dims
            replace_value(y, back, outside)
        _set_rows(y, lead, width)
        for view in views:
            _read_rows(op, view, lead)
    for node in products:  # a Gemm reads the weight as it is stored, once neighbours are joined
        op.position = node
        y = node.outputs[0]
        replace_value(y, op.Gemm(*node.inputs), list(y.uses()))
    return 1


def _adapt_node(node: ir.Node, op: OpBuilder) -> None:
    """Let a node of a region work on matrices; what it reads is turned already or soon will be."""
    op.position = node
    if is_op(node, *_REDUCTIONS):
        node.replace_input_with(1, op.const([-1]))
    elif is_op(node, *_ALONG_LAST):
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
    elif is_op(node, "Reshape"):
        node.replace_input_with(1, op.const([-1, _width(node.outputs[0])]))
        node.attributes.pop("allowzero", None)
        _share_shape(node.outputs[0])


def _share_shape(flat: ir.Value) -> None:
    """Let views that are equal to this one read the same constant, so that they are merged."""
    node = flat.producer()
    assert node is not None
    x, sizes = node.inputs
    assert x is not None
    for other, index in list(x.uses()):
        if index != 0 or other is node or not is_op(other, "Reshape"):
            continue
        if S.symbolic_of(other.inputs[1]) == S.symbolic_of(sizes):
            other.replace_input_with(1, sizes)
            other.attributes.pop("allowzero", None)


def _read_rows(op: OpBuilder, node: ir.Node, lead: Lead) -> None:
    """Let a node behind a region read a matrix: a Reshape, or a sum over all rows."""
    op.position = node
    if is_op(node, "Shape"):
        return
    if is_op(node, "ReduceSum"):
        node.replace_input_with(1, op.const([0]))
        return
    dims = S.dims_of(node.outputs[0]) or ()
    if _is_flat(node):
        node.outputs[0].shape = node.inputs[0].shape if node.inputs[0] is not None else None
    elif 0 in (S.symbolic_of(node.inputs[1]) or ()):
        # A zero stands for a size of the input, which has other axes now.
        sizes = [*_lead_sizes(op, lead), *(D.static_sizes(dims[2:]) or [])]
        node.replace_input_with(1, op.vector(sizes))


def _regions(graph: ir.Graph, fed: set[str]) -> list[_Region]:
    """Return nodes that hang together by values of rows with the same leading axes."""
    parent: dict[ir.Node | ir.Value, ir.Node | ir.Value] = {}

    def root(a: ir.Node | ir.Value) -> ir.Node | ir.Value:
        while parent.setdefault(a, a) is not a:
            parent[a] = a = parent[parent[a]]
        return a

    leads: dict[ir.Node, Lead] = {}
    for node in nodes(graph):
        lead = _lead(node.outputs[0])
        if lead is None or not _are_sizes_available(lead, fed) or not _is_rowwise(node, lead):
            continue
        leads[node] = lead
        for x in (*_rows_of(node, lead), *(y for y in node.outputs if _lead(y) == lead)):
            parent[root(x)] = root(node)
    groups: dict[object, _Region] = {}
    for node, lead in leads.items():
        groups.setdefault(root(node), _Region(lead, [])).nodes.append(node)
    return list(groups.values())


def _is_rowwise(node: ir.Node, lead: Lead) -> bool:
    """Return whether a node treats rows alike, whatever axes they are on."""
    y, inputs = node.outputs[0], [x for x in node.inputs if x is not None]
    if is_op(node, *_ROWWISE):
        return all(_lead(x) == lead or _rank(x) in (0, 1) for x in inputs) and any(
            _lead(x) == lead for x in inputs
        )
    if not inputs or (_lead(inputs[0]) != lead and not is_op(node, "Reshape")):
        return False
    if is_op(node, *_REDUCTIONS):
        return _axes(node) == [2] and _flag(node, "keepdims", 1) == 1
    if is_op(node, *_ALONG_LAST):
        return _flag(node, "axis", -1) in (-1, 2) and all(_rank(x) == 1 for x in inputs[1:])
    if is_op(node, "MatMul"):
        return _rank(inputs[1]) == 2 and isinstance(_width(y), int)
    if is_op(node, "Reshape"):  # heads that are joined; other views end a region
        dims = S.dims_of(inputs[0]) or ()
        return len(dims) == 4 and dims[:2] == lead and isinstance(_width(y), int)
    return False


def _rows_of(node: ir.Node, lead: Lead) -> list[ir.Value]:
    """Return the inputs of a node of a region that hold rows."""
    if is_op(node, "Reshape"):
        return []
    return [x for x in node.inputs if x is not None and _lead(x) == lead]


def _follows(node: ir.Node, index: int, own: Iterable[ir.Node]) -> bool:
    """Return whether a reader of rows takes a matrix as well."""
    if node in own:
        return True
    x = node.inputs[0]
    if index != 0 or x is None or x.graph is not node.graph:
        return False
    if is_op(node, "ReduceSum"):
        return _axes(node) == [0, 1] and _flag(node, "keepdims", 1) == 0
    if is_op(node, "Shape"):
        return _is_size_only_a_dependency(node)
    if not is_op(node, "Reshape"):
        return False
    shape, dims = S.symbolic_of(node.inputs[1]), S.dims_of(node.outputs[0])
    if _is_flat(node):
        return True
    if shape is None or dims is None or _flag(node, "allowzero", 0):
        return False
    if 0 not in shape:
        return True
    return list(shape[:2]) == [0, 0] and 0 not in shape[2:] and D.static_sizes(dims[2:]) is not None


def _is_size_only_a_dependency(node: ir.Node) -> bool:
    """Return whether the first size is asked for only to know that the value is there."""
    y = node.outputs[0]
    if _flag(node, "start", 0) != 0 or _flag(node, "end", -1) != 1 or y.is_graph_output():
        return False
    return all(is_op(n, "Min") and _has_zero(n) for n, _ in y.uses())


def _has_zero(node: ir.Node) -> bool:
    numbers = [S.constant_of(x) for x in node.inputs]
    return any(n is not None and n.size == 1 and n.item() == 0 for n in numbers)


def _is_flat(node: ir.Node) -> bool:
    """Return whether a node joins the axes of rows and does nothing else."""
    if not is_op(node, "Reshape") or node.inputs[0] is None:
        return False
    width = _width(node.inputs[0])
    return isinstance(width, int) and S.symbolic_of(node.inputs[1]) == (-1, width)


def _is_turned(node: ir.Node) -> bool:
    """Return whether a product reads a transposed weight that a Gemm can read as it is stored."""
    w = node.inputs[1] if is_op(node, "MatMul") else None
    turn = None if w is None else w.producer()
    if w is None or turn is None or not is_op(turn, "Transpose") or w.is_graph_output():
        return False
    return w.dtype in _GEMM_TYPES and turn.graph is node.graph


def _lead_sizes(op: OpBuilder, lead: Lead) -> list[Size]:
    """Return the sizes of the two axes as a Reshape wants them."""
    if sum(not isinstance(d, int) for d in lead) == 1:
        return [d if isinstance(d, int) else -1 for d in lead]
    sizes = [d if isinstance(d, int) else op.input_size(d) for d in lead if d is not None]
    return [s for s in sizes if s is not None]


def _are_sizes_available(lead: Lead, fed: set[str]) -> bool:
    """Return whether the sizes are numbers or asked of an input; a view may leave out one."""
    unknown = [d for d in lead if not isinstance(d, int)]
    if any(d == 0 for d in lead):
        return False
    return len(unknown) <= 1 or all(d in fed for d in unknown)


def _has_at_most_one_symbol(lead: Lead) -> bool:
    return sum(not isinstance(d, int) for d in lead) <= 1


def _lead(x: ir.Value) -> Lead | None:
    dims = None if isinstance(x.type, ir.SequenceType | ir.OptionalType) else S.dims_of(x)
    if dims is None or len(dims) != 3 or None in dims or not isinstance(dims[2], int):
        return None
    return (dims[0], dims[1])


def _set_rows(x: ir.Value, lead: Lead, width: Dim) -> None:
    S.set_dims(x, [D.product(lead), width])


def _width(x: ir.Value) -> Dim:
    return (S.dims_of(x) or (None,))[-1]


def _rank(x: ir.Value) -> int | None:
    return None if x.shape is None else len(x.shape)


def _axes(node: ir.Node) -> list[int] | None:
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    if x is None or x.shape is None or axes is None:
        return None
    return sorted(int(a) % len(x.shape) for a in axes.reshape(-1))


def _flag(node: ir.Node, name: str, default: int) -> int:
    given = node.attributes.get(name)
    return default if given is None else given.as_int()


_COMMUTATIVE = ("Add", "Mul")
_BROADCASTING = (*_COMMUTATIVE, "Sub", "Div", "Where")
_ELEMENTWISE = (
    *_BROADCASTING,
    *("Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Log", "Max", "Min", "Neg", "Pow", "Reciprocal"),
    *("Relu", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sum", "Tanh"),
)
_Dims = tuple[Dim, ...]


def coalesce_broadcast_dims(model: ir.Model, op: OpBuilder) -> int:
    """Join axes of nodes that broadcast; return how many nodes changed."""
    remove_dead_nodes(op.graph)  # what earlier passes left counts as no reader
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    forms = _coalesced_dims(nodes(op.graph, *_ELEMENTWISE))
    views: dict[tuple[ir.Value, _Dims], ir.Value] = {}
    for node, form in forms.items():
        _coalesce_node(op, node, form, views, following[node])
    return len(forms) + sum(_put_full_operand_first(n) for n in nodes(op.graph, *_COMMUTATIVE))


@dataclasses.dataclass(frozen=True)
class _Coalesced:
    """How the axes of a result are joined."""

    dims: _Dims
    groups: tuple[int, ...]
    """So many axes after each other become one."""

    def joined(self, dims: _Dims) -> _Dims | None:
        """Return what an operand's sizes become, ``None`` if it tells joined axes apart."""
        if all(d == 1 for d in dims):
            return dims if len(dims) <= len(self.groups) else ()
        if len(dims) > len(self.dims):
            return None
        sizes, start = _padded(dims, len(self.dims)), 0
        flat: list[Dim] = []
        for count in self.groups:
            whole, own = (d[start : start + count] for d in (self.dims, sizes))
            if own != whole and any(d != 1 for d in own):
                return None
            flat.append(D.product(own))
            start += count
        while dims != self.dims and flat[0] == 1:  # left to the broadcast
            del flat[0]
        return tuple(flat)


def _coalesced_dims(candidates: Sequence[ir.Node]) -> dict[ir.Node, _Coalesced]:
    """Return the nodes to change: those that broadcast, and what lies between two of them."""
    seeds = {n: f for n in candidates if (f := _coalesced_dims_of(n)) is not None}
    made: dict[ir.Value, list[_Coalesced]] = collections.defaultdict(list)
    for node in candidates:
        own = [seeds[node]] if node in seeds else _passed_on(node, made)
        made[node.outputs[0]] = own
    wanted: dict[ir.Value, set[_Coalesced]] = collections.defaultdict(set)
    chosen: dict[ir.Node, _Coalesced] = {}
    for node in reversed(candidates):
        y = node.outputs[0]
        both = [f for f in made[y] if node in seeds or f in wanted[y]]
        if both and not y.is_graph_output():
            chosen[node] = both[0]
        reached = (
            {seeds[node]} if node in seeds else {f for f in wanted[y] if _can_coalesce(node, f)}
        )
        for x in node.inputs:
            if x is not None and S.dims_of(x) == S.dims_of(y):
                wanted[x] |= reached
    return {n: chosen[n] for n in candidates if n in chosen}


def _passed_on(node: ir.Node, made: dict[ir.Value, list[_Coalesced]]) -> list[_Coalesced]:
    """Return the forms that operands of a node have, if it can have them, too."""
    dims = S.dims_of(node.outputs[0])
    given = [f for x in node.inputs if x is not None and x in made for f in made[x]]
    return [f for f in dict.fromkeys(given) if f.dims == dims and _can_coalesce(node, f)]


def _can_coalesce(node: ir.Node, form: _Coalesced) -> bool:
    operands = [S.dims_of(x) for x in node.inputs if x is not None]
    return all(d is not None and form.joined(d) is not None for d in operands)


def _coalesced_dims_of(node: ir.Node) -> _Coalesced | None:
    """Return how a node's axes are joined where that makes a faster kernel or fewer axes."""
    y = node.outputs[0]
    dims = S.dims_of(y)
    operands = [S.dims_of(x) for x in node.inputs if x is not None]
    if not is_op(node, *_BROADCASTING) or dims is None or None in dims or y.is_graph_output():
        return None
    if (
        math.prod(d for d in dims if isinstance(d, int)) < T.COALESCED_BROADCAST_ELEMENTS
        or _count_unknown(dims) > 1
    ):
        return None
    known = [d for d in operands if d is not None and None not in d]
    spread = [d for d in known if d != dims and any(n != 1 for n in d)]
    if len(known) < len(operands) or not spread or _is_fast(node, known, spread):
        return None
    groups = _groups(dims, spread)
    form = None if len(groups) == len(dims) else _Coalesced(dims, groups)
    return form if form is not None and _can_coalesce(node, form) and not _is_fused(node) else None


def _groups(dims: _Dims, operands: Sequence[_Dims]) -> tuple[int, ...]:
    """Return how many axes after each other all operands treat alike."""
    groups: list[int] = []
    current: list[bool] | None = None
    for axis, size in enumerate(dims):
        alike = [_padded(d, len(dims))[axis] == size for d in operands]
        if groups and (size == 1 or current is None or alike == current):
            groups[-1] += 1
        else:
            groups.append(1)
        current = current if size == 1 else alike
    return tuple(groups)


def _is_fast(node: ir.Node, operands: Sequence[_Dims], spread: Sequence[_Dims]) -> bool:
    """Return whether one operand is whole, and the other has one axis, on a side that will do."""
    if is_op(node, "Where") or len(spread) != 1 or sum(n != 1 for n in spread[0]) != 1:
        return False
    return operands[1] == spread[0] or is_op(node, *_COMMUTATIVE)


def _is_fused(node: ir.Node) -> bool:
    """Return whether onnxruntime adds a mask inside the softmax that reads it."""
    y = node.outputs[0]
    readers = [n for n, _ in y.uses()]
    if not is_op(node, "Add") or len(readers) != 1 or not is_op(readers[0], "Softmax"):
        return False
    dims, axis = S.dims_of(y), readers[0].attributes.get("axis")
    if not dims:
        return False
    last, columns = len(dims) - 1, dims[-1]
    if y.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or not isinstance(columns, int):
        return False
    if columns > T.FUSED_SOFTMAX_COLUMNS or (axis and axis.as_int() not in (-1, last)):
        return False
    masks = [S.dims_of(x) or () for x in node.inputs if x is not None and S.dims_of(x) != dims]
    alike = [a == b for a, b in zip(_padded(masks[0], len(dims)), dims, strict=True)]
    changes = sum(a != b for a, b in itertools.pairwise(alike[:-1]))
    return alike[-1] and changes <= 1


def _coalesce_node(
    op: OpBuilder,
    node: ir.Node,
    form: _Coalesced,
    views: dict[tuple[ir.Value, _Dims], ir.Value],
    following: ir.Node | None,
) -> None:
    """Let a node work on joined axes; what else reads its result gets a view of it."""
    op.position = node
    for i, x in enumerate(node.inputs):
        dims = None if x is None else form.joined(S.dims_of(x) or ())
        if x is None or dims is None or dims == S.dims_of(x):
            continue
        if (x, dims) not in views:
            views[x, dims] = _view(op, x, dims)
        node.replace_input_with(i, views[x, dims])
    y = node.outputs[0]
    uses, flat = list(y.uses()), form.joined(form.dims)
    assert flat is not None
    S.set_dims(y, flat)
    op.position = following
    back = op.Reshape(y, _reshape_sizes(form.dims))
    S.set_dims(back, form.dims)
    for reader, index in uses:
        reader.replace_input_with(index, back)
    views[back, flat] = y


def _view(op: OpBuilder, x: ir.Value, dims: _Dims) -> ir.Value:
    array = S.constant_of(x) if S.is_generated_constant(x) else None
    if array is not None:
        return op.const(array.reshape(_reshape_sizes(dims)), x.dtype)
    view = op.Reshape(x, _reshape_sizes(dims))
    S.set_dims(view, dims)
    return view


def _put_full_operand_first(node: ir.Node) -> int:
    """Put the operand that is broadcast to the right, where kernels for one axis look for it."""
    a, b, dims = node.inputs[0], node.inputs[1], S.dims_of(node.outputs[0])
    first, second = (None if x is None else S.dims_of(x) for x in (a, b))
    if dims is None or second != dims or first is None or sum(n != 1 for n in first) != 1:
        return 0
    if first == dims:
        return 0
    node.replace_input_with(0, b)
    node.replace_input_with(1, a)
    return 1


def _padded(dims: _Dims, rank: int) -> _Dims:
    return (*[1] * (rank - len(dims)), *dims)


def _count_unknown(dims: _Dims) -> int:
    return sum(not isinstance(d, int) for d in dims)


def _reshape_sizes(dims: _Dims) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in dims]


_MOVES = ("Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_SHORT = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def remove_casts_around_views(model: ir.Model, op: OpBuilder) -> int:
    """Move elements in the type that they come from and go to; return how many casts went."""
    remove_dead_nodes(op.graph)
    moved: dict[ir.Value, ir.Value] = {}
    changed = 0
    for node in nodes(op.graph, "Cast"):
        x, y = node.inputs[0], node.outputs[0]
        if x is None or y.is_graph_output() or y.dtype not in _SHORT:
            continue
        chain = _chain(x, y.dtype)
        if chain is None:
            continue
        op.position = node
        replace_value(y, _moved(op, chain, moved), list(y.uses()))
        changed += 1
    return changed


def _chain(x: ir.Value, short: ir.DataType | None) -> list[ir.Node] | None:
    """Return the nodes from a cast of a short number to ``x``, the cast first."""
    chain: list[ir.Node] = []
    home = None
    while (node := x.producer()) is not None and home in (None, node.graph):
        home = node.graph
        chain.insert(0, node)
        source = node.inputs[0]
        if source is None:
            return None
        if is_op(node, "Cast"):
            return chain if source.dtype == short and x.dtype == ir.DataType.FLOAT else None
        if not is_op(node, *_MOVES):
            return None
        x = source
    return None


def _moved(op: OpBuilder, chain: list[ir.Node], moved: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return what the nodes behind the first give for its input as it is."""
    x = chain[0].inputs[0]
    assert x is not None
    for node in chain[1:]:
        y = node.outputs[0]
        if y not in moved:
            moved[y] = copy_node(op, node, [x, *node.inputs[1:]])
            moved[y].shape = y.shape
        x = moved[y]
    return x


def deduplicate_slices(model: ir.Model, op: OpBuilder) -> int:
    """Let equal slices of one value be one; return how many there are less."""
    first: dict[tuple, ir.Value] = {}
    removed = 0
    for node in list(nodes(op.graph, "Slice")):
        x, y = node.inputs[0], node.outputs[0]
        numbers = _slice_parameters(node)
        if x is None or numbers is None or y.is_graph_output():
            continue
        stands = x if _takes_all(x, y, numbers) else first.setdefault((x, *numbers), y)
        if stands is not y:
            y.replace_all_uses_with(stands)
            op.graph.remove(node, safe=True)
            removed += 1
    return removed


def _slice_parameters(node: ir.Node) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return starts, ends, axes and steps, if all that are given are constants."""
    numbers: list[tuple[int, ...] | None] = []
    for value in (*node.inputs[1:], None, None)[:4]:
        array = S.constant_of(value)
        if value is not None and array is None:
            return None
        numbers.append(None if array is None else tuple(int(v) for v in array.ravel()))
    return tuple(numbers)


def _takes_all(x: ir.Value, y: ir.Value, numbers: tuple[tuple[int, ...] | None, ...]) -> bool:
    return S.same_shape(x, y) and all(step > 0 for step in numbers[3] or ())
