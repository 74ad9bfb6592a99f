"""Batch and sequence joined to one axis of rows, for as long as nothing tells them apart.

A product with a matrix, a sum along the last axis and what works on elements give the same for
``[batch, length, width]`` and for ``[batch * length, width]``. The gradients of weights need the
second, so a model of the first has a Reshape on both sides of each product, and turns weights that
are stored ``[out, in]``, which a Gemm reads as they lie. Regions of such nodes are turned as a
whole, where that saves nodes: the numbers are the same, and views remain at the borders only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.builder.shape_ops import Size
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

_ELEMENTWISE = frozenset(
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

_SIZES_ASKED = 3
"""Nodes that tell a view both sizes, if neither is a number."""

Lead = tuple[Dim, Dim]
"""The sizes of the two axes that are joined."""


def rows_in_one_axis(model: ir.Model, op: OpBuilder) -> int:
    """Join axes where that leaves fewer nodes; return in how many regions."""
    fed = {d for x in model.graph.inputs for d in S.dims_of(x) or () if isinstance(d, str)}
    return sum(_turn(op, region) for region in _regions(model.graph, fed) if region.saved() > 0)


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
        return views - len(ends) - len(taken) - (0 if _numbers(self.lead) else _SIZES_ASKED)


def _turn(op: OpBuilder, region: _Region) -> int:
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
        _adapt(node, op)
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
            back = op.reshape(y, [*_sizes(op, lead), width])
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


def _adapt(node: ir.Node, op: OpBuilder) -> None:
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
        sizes = [*_sizes(op, lead), *(D.numbers(dims[2:]) or [])]
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
        if lead is None or not _can_be_told(lead, fed) or not _fits(node, lead):
            continue
        leads[node] = lead
        for x in (*_rows_of(node, lead), *(y for y in node.outputs if _lead(y) == lead)):
            parent[root(x)] = root(node)
    groups: dict[object, _Region] = {}
    for node, lead in leads.items():
        groups.setdefault(root(node), _Region(lead, [])).nodes.append(node)
    return list(groups.values())


def _fits(node: ir.Node, lead: Lead) -> bool:
    """Return whether a node treats rows alike, whatever axes they are on."""
    y, inputs = node.outputs[0], [x for x in node.inputs if x is not None]
    if is_op(node, *_ELEMENTWISE):
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
        return _only_waits(node)
    if not is_op(node, "Reshape"):
        return False
    shape, dims = S.symbolic_of(node.inputs[1]), S.dims_of(node.outputs[0])
    if _is_flat(node):
        return True
    if shape is None or dims is None or _flag(node, "allowzero", 0):
        return False
    if 0 not in shape:
        return True
    return list(shape[:2]) == [0, 0] and 0 not in shape[2:] and D.numbers(dims[2:]) is not None


def _only_waits(node: ir.Node) -> bool:
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


def _sizes(op: OpBuilder, lead: Lead) -> list[Size]:
    """Return the sizes of the two axes as a Reshape wants them."""
    if sum(not isinstance(d, int) for d in lead) == 1:
        return [d if isinstance(d, int) else -1 for d in lead]
    sizes = [d if isinstance(d, int) else op.fed_size(d) for d in lead if d is not None]
    return [s for s in sizes if s is not None]


def _can_be_told(lead: Lead, fed: set[str]) -> bool:
    """Return whether the sizes are numbers or asked of an input; a view may leave out one."""
    unknown = [d for d in lead if not isinstance(d, int)]
    if any(d == 0 for d in lead):
        return False
    return len(unknown) <= 1 or all(d in fed for d in unknown)


def _numbers(lead: Lead) -> bool:
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


__all__ = ["rows_in_one_axis"]
