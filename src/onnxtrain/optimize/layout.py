"""Rewrites of shapes and views: fewer axes, fewer casts and fewer slices.

- `flatten_batch_dims` (CPU): `[batch, length, width]` becomes `[batch * length, width]` between the
  views that need the axes.
- `coalesce_broadcast_dims` (CUDA): axes that a broadcast treats alike become one.
- `remove_casts_around_views` (CUDA): values are transposed in 16 bits, not in float32.
- `deduplicate_slices`: equal slices of a value become one.
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

_SHAPE_NODES = 3  # nodes that compute the shape of a view if both sizes are symbolic

Lead = tuple[Dim, Dim]
"""Sizes of the two axes that are flattened."""


def flatten_batch_dims(model: ir.Model, op: OpBuilder) -> int:
    """Flatten batch and sequence of regions where that saves nodes; return how many regions.

        before:  [batch, length, width] with Reshape around each weight gradient
        after:   [batch * length, width] with Reshape at the borders of the region

    A matmul with a matrix, a reduction of the last axis and elementwise operators give the same
    result for both. Gradients of weights need rows, so a model with three axes has a Reshape on
    both sides of each matmul. It also transposes weights stored as [out, in], which Gemm reads
    directly.
    """
    fed = {d for x in model.graph.inputs for d in S.dims_of(x) or () if isinstance(d, str)}
    return sum(
        _flatten_region(op, region) for region in _regions(model.graph, fed) if region.saved() > 0
    )


@dataclasses.dataclass(eq=False)
class _Region:
    """Connected nodes that work on rows; `lead` are the sizes of the axes of the rows."""

    lead: Lead
    nodes: list[ir.Node]

    def results(self) -> list[ir.Value]:
        """Return the rows that the nodes compute."""
        return [y for n in self.nodes for y in n.outputs if _lead(y) == self.lead]

    def operands(self) -> list[ir.Value]:
        """Return the rows that other nodes compute."""
        own = set(self.nodes)
        read = (x for n in self.nodes for x in _rows_of(n, self.lead))
        return list(dict.fromkeys(x for x in read if x.producer() not in own))

    def saved(self) -> int:
        """Return how many nodes flattening the region saves."""
        own, results, operands = set(self.nodes), self.results(), self.operands()
        views = sum(_is_flatten(n) for v in (*results, *operands) for n, i in v.uses() if i == 0)
        transposes = {n.inputs[1]: None for n in self.nodes if _reads_transpose(n)}
        views += sum(all(n in own for n, _ in w.uses()) for w in transposes if w is not None)
        outside = [y for y in results if any(not _accepts_rows(n, i, own) for n, i in y.uses())]
        ends = {*outside, *(y for y in results if y.is_graph_output())}
        return (
            views
            - len(ends)
            - len(operands)
            - (0 if _has_at_most_one_symbol(self.lead) else _SHAPE_NODES)
        )


def _flatten_region(op: OpBuilder, region: _Region) -> int:
    """Flatten the rows of a region, in place."""
    own, lead = set(region.nodes), region.lead
    results, operands = region.results(), region.operands()
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    first = order[0]
    for x in operands:
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
    matmuls = [n for n in region.nodes if _reads_transpose(n)]
    for y in results:
        width, dims = _width(y), y.shape
        outside = [(n, i) for n, i in y.uses() if not _accepts_rows(n, i, own)]
        views = [n for n, i in y.uses() if _accepts_rows(n, i, own) and n not in own]
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
    for node in matmuls:  # Gemm needs a matrix, so this comes after the rows are flat
        op.position = node
        y = node.outputs[0]
        replace_value(y, op.Gemm(*node.inputs), list(y.uses()))
    return 1


def _adapt_node(node: ir.Node, op: OpBuilder) -> None:
    """Change a node's axes and shapes for rows; its operands are flattened by the caller."""
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
    """Give views equal to this one the same shape input, so that onnxruntime merges them."""
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
    """Change a node after a region to read rows: a Reshape, or a sum over batch and sequence."""
    op.position = node
    if is_op(node, "Shape"):
        return
    if is_op(node, "ReduceSum"):
        node.replace_input_with(1, op.const([0]))
        return
    dims = S.dims_of(node.outputs[0]) or ()
    if _is_flatten(node):
        node.outputs[0].shape = node.inputs[0].shape if node.inputs[0] is not None else None
    elif 0 in (S.symbolic_of(node.inputs[1]) or ()):
        # A zero copies a size of the input, which has other axes now.
        sizes = [*_lead_sizes(op, lead), *(D.static_sizes(dims[2:]) or [])]
        node.replace_input_with(1, op.vector(sizes))


def _regions(graph: ir.Graph, fed: set[str]) -> list[_Region]:
    """Return groups of nodes connected by rows with the same leading sizes."""
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
    """Return whether a node treats all rows alike."""
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
    if is_op(node, "Reshape"):  # joins heads; other views end a region
        dims = S.dims_of(inputs[0]) or ()
        return len(dims) == 4 and dims[:2] == lead and isinstance(_width(y), int)
    return False


def _rows_of(node: ir.Node, lead: Lead) -> list[ir.Value]:
    """Return the inputs of a node that are rows."""
    if is_op(node, "Reshape"):
        return []
    return [x for x in node.inputs if x is not None and _lead(x) == lead]


def _accepts_rows(node: ir.Node, index: int, own: Iterable[ir.Node]) -> bool:
    """Return whether a reader of a value can read flattened rows as well."""
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
    if _is_flatten(node):
        return True
    if shape is None or dims is None or _flag(node, "allowzero", 0):
        return False
    if 0 not in shape:
        return True
    return list(shape[:2]) == [0, 0] and 0 not in shape[2:] and D.static_sizes(dims[2:]) is not None


def _is_size_only_a_dependency(node: ir.Node) -> bool:
    """Return whether a Shape only orders execution: readers take the minimum with zero."""
    y = node.outputs[0]
    if _flag(node, "start", 0) != 0 or _flag(node, "end", -1) != 1 or y.is_graph_output():
        return False
    return all(is_op(n, "Min") and _has_zero(n) for n, _ in y.uses())


def _has_zero(node: ir.Node) -> bool:
    constants = [S.constant_of(x) for x in node.inputs]
    return any(c is not None and c.size == 1 and c.item() == 0 for c in constants)


def _is_flatten(node: ir.Node) -> bool:
    """Return whether a node only flattens the axes of rows."""
    if not is_op(node, "Reshape") or node.inputs[0] is None:
        return False
    width = _width(node.inputs[0])
    return isinstance(width, int) and S.symbolic_of(node.inputs[1]) == (-1, width)


def _reads_transpose(node: ir.Node) -> bool:
    """Return whether a matmul reads a transposed weight, which Gemm reads without the transpose."""
    w = node.inputs[1] if is_op(node, "MatMul") else None
    transpose = None if w is None else w.producer()
    if w is None or transpose is None or not is_op(transpose, "Transpose"):
        return False
    return not w.is_graph_output() and w.dtype in _GEMM_TYPES and transpose.graph is node.graph


def _lead_sizes(op: OpBuilder, lead: Lead) -> list[Size]:
    """Return the two leading sizes for Reshape, with -1 for one symbolic size."""
    if sum(not isinstance(d, int) for d in lead) == 1:
        return [d if isinstance(d, int) else -1 for d in lead]
    sizes = [d if isinstance(d, int) else op.input_size(d) for d in lead if d is not None]
    return [s for s in sizes if s is not None]


def _are_sizes_available(lead: Lead, fed: set[str]) -> bool:
    """Return whether sizes are static or can be read from an input; a view may infer one."""
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
    return node.attributes.get_int(name, default)


# Axes that a broadcast treats alike.

_COMMUTATIVE = ("Add", "Mul")
_BROADCASTING = (*_COMMUTATIVE, "Sub", "Div", "Where")
_ELEMENTWISE = (
    *_BROADCASTING,
    *("Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Log", "Max", "Min", "Neg", "Pow", "Reciprocal"),
    *("Relu", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sum", "Tanh"),
)
_Dims = tuple[Dim, ...]


def coalesce_broadcast_dims(model: ir.Model, op: OpBuilder) -> int:
    """Coalesce axes of elementwise nodes that broadcast; return how many nodes changed.

        before:  [8, 12, 512, 512] - [8, 12, 512, 1]
        after:   [49152, 512] - [49152, 1]

    CUDA has a kernel for a right operand with one axis that is not 1, which runs at memory speed.
    The general kernel divides by the size of each axis for each element. Views cost nothing, and
    nodes between two coalesced ones are coalesced as well, so that they need no views.
    """
    remove_dead_nodes(op.graph)  # dead nodes count as readers
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    coalesced = _coalesced_dims(nodes(op.graph, *_ELEMENTWISE))
    views: dict[tuple[ir.Value, _Dims], ir.Value] = {}
    for node, dims in coalesced.items():
        _coalesce_node(op, node, dims, views, following[node])
    return len(coalesced) + sum(_put_full_operand_first(n) for n in nodes(op.graph, *_COMMUTATIVE))


@dataclasses.dataclass(frozen=True)
class _Coalesced:
    """How the axes of a result are coalesced.

    Attributes:
        dims: sizes of the result.
        groups: numbers of consecutive axes that become one.
    """

    dims: _Dims
    groups: tuple[int, ...]

    def apply(self, dims: _Dims) -> _Dims | None:
        """Return the coalesced sizes of an operand; None if coalesced axes differ in it."""
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
        while dims != self.dims and flat[0] == 1:  # broadcasting adds it back
            del flat[0]
        return tuple(flat)


def _coalesced_dims(candidates: Sequence[ir.Node]) -> dict[ir.Node, _Coalesced]:
    """Return the nodes to change: those that broadcast slowly, and those between two of them."""
    seeds = {n: f for n in candidates if (f := _coalesced_dims_of(n)) is not None}
    from_operands: dict[ir.Value, list[_Coalesced]] = collections.defaultdict(list)
    for node in candidates:
        own = [seeds[node]] if node in seeds else _inherited(node, from_operands)
        from_operands[node.outputs[0]] = own
    from_readers: dict[ir.Value, set[_Coalesced]] = collections.defaultdict(set)
    chosen: dict[ir.Node, _Coalesced] = {}
    for node in reversed(candidates):
        y = node.outputs[0]
        both = [f for f in from_operands[y] if node in seeds or f in from_readers[y]]
        if both and not y.is_graph_output():
            chosen[node] = both[0]
        if node in seeds:
            backward = {seeds[node]}
        else:
            backward = {f for f in from_readers[y] if _can_coalesce(node, f)}
        for x in node.inputs:
            if x is not None and S.dims_of(x) == S.dims_of(y):
                from_readers[x] |= backward
    return {n: chosen[n] for n in candidates if n in chosen}


def _inherited(node: ir.Node, from_operands: dict[ir.Value, list[_Coalesced]]) -> list[_Coalesced]:
    """Return how operands of a node are coalesced, if the node can be coalesced like that."""
    dims = S.dims_of(node.outputs[0])
    forms = [f for x in node.inputs if x in from_operands for f in from_operands[x]]
    return [f for f in dict.fromkeys(forms) if f.dims == dims and _can_coalesce(node, f)]


def _can_coalesce(node: ir.Node, form: _Coalesced) -> bool:
    operands = [S.dims_of(x) for x in node.inputs if x is not None]
    return all(d is not None and form.apply(d) is not None for d in operands)


def _coalesced_dims_of(node: ir.Node) -> _Coalesced | None:
    """Return how to coalesce a node's axes, if that gives a faster kernel or fewer axes."""
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
    broadcast = [d for d in known if d != dims and any(n != 1 for n in d)]
    if len(known) < len(operands) or not broadcast or _is_fast(node, known, broadcast):
        return None
    groups = _groups(dims, broadcast)
    form = None if len(groups) == len(dims) else _Coalesced(dims, groups)
    return form if form is not None and _can_coalesce(node, form) and not _is_fused(node) else None


def _groups(dims: _Dims, operands: Sequence[_Dims]) -> tuple[int, ...]:
    """Return lengths of runs of axes that all operands treat alike."""
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


def _is_fast(node: ir.Node, operands: Sequence[_Dims], broadcast: Sequence[_Dims]) -> bool:
    """Return whether one operand is broadcast along all axes but one: there is a fast kernel."""
    if is_op(node, "Where") or len(broadcast) != 1 or sum(n != 1 for n in broadcast[0]) != 1:
        return False
    return operands[1] == broadcast[0] or is_op(node, *_COMMUTATIVE)


def _is_fused(node: ir.Node) -> bool:
    """Return whether onnxruntime fuses the addition of a mask into the softmax that reads it."""
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
    """Give a node coalesced operands, and its other readers a view with the old axes."""
    op.position = node
    for i, x in enumerate(node.inputs):
        dims = None if x is None else form.apply(S.dims_of(x) or ())
        if x is None or dims is None or dims == S.dims_of(x):
            continue
        if (x, dims) not in views:
            views[x, dims] = _view(op, x, dims)
        node.replace_input_with(i, views[x, dims])
    y = node.outputs[0]
    uses, flat = list(y.uses()), form.apply(form.dims)
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
    """Move an operand with one axis to the right, where the fast kernel needs it."""
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


# Casts around views.

_MOVES = ("Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_SHORT = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def remove_casts_around_views(model: ir.Model, op: OpBuilder) -> int:
    """Move elements in 16 bits between a cast to float32 and a cast back; return how many.

        before:  Cast(Transpose(Cast(x, float32)), bfloat16)
        after:   Transpose(x)

    Earlier passes leave such pairs where they remove the operator in between. This saves two
    passes, and half of the bytes that are moved.
    """
    remove_dead_nodes(op.graph)  # dead nodes count as readers
    copies: dict[ir.Value, ir.Value] = {}
    changed = 0
    for node in nodes(op.graph, "Cast"):
        x, y = node.inputs[0], node.outputs[0]
        if x is None or y.is_graph_output() or y.dtype not in _SHORT:
            continue
        chain = _views_since_cast(x, y.dtype)
        if chain is None:
            continue
        op.position = node
        replace_value(y, _copy_views(op, chain, copies), list(y.uses()))
        changed += 1
    return changed


def _views_since_cast(x: ir.Value, short: ir.DataType | None) -> list[ir.Node] | None:
    """Return the nodes from a cast of 16 bits to `x`, the cast first."""
    chain: list[ir.Node] = []
    graph = None
    while (node := x.producer()) is not None and graph in (None, node.graph):
        graph = node.graph
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


def _copy_views(op: OpBuilder, chain: list[ir.Node], copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return the result of the nodes after the cast, applied to the cast's input."""
    x = chain[0].inputs[0]
    assert x is not None
    for node in chain[1:]:
        y = node.outputs[0]
        if y not in copies:
            copies[y] = copy_node(op, node, [x, *node.inputs[1:]])
            copies[y].shape = y.shape
        x = copies[y]
    return x


# Slices.


def deduplicate_slices(model: ir.Model, op: OpBuilder) -> int:
    """Merge equal slices and remove slices that take everything; return how many vanish.

    Exporters write `x[0::2, 0::2]` and `x[0::2, 1::2]` as two slices each, of which the first are
    equal. Once these are shared, the gradient writes all pieces side by side in two steps.
    Otherwise it pads each piece with zeros to the whole and adds all of them.
    """
    first: dict[tuple, ir.Value] = {}
    removed = 0
    for node in list(nodes(op.graph, "Slice")):
        x, y = node.inputs[0], node.outputs[0]
        parameters = _slice_parameters(node)
        if x is None or parameters is None or y.is_graph_output():
            continue
        same = x if _takes_all(x, y, parameters) else first.setdefault((x, *parameters), y)
        if same is not y:
            y.replace_all_uses_with(same)
            op.graph.remove(node, safe=True)
            removed += 1
    return removed


def _slice_parameters(node: ir.Node) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return starts, ends, axes and steps, if none of them is computed."""
    parameters: list[tuple[int, ...] | None] = []
    for value in (*node.inputs[1:], None, None)[:4]:
        array = S.constant_of(value)
        if value is not None and array is None:
            return None
        parameters.append(None if array is None else tuple(int(v) for v in array.ravel()))
    return tuple(parameters)


def _takes_all(x: ir.Value, y: ir.Value, parameters: tuple[tuple[int, ...] | None, ...]) -> bool:
    return S.same_shape(x, y) and all(step > 0 for step in parameters[3] or ())
