"""Axes that a broadcast treats alike, joined to one.

``[8, 12, 512, 512] - [8, 12, 512, 1]`` is ``[49152, 512] - [49152, 1]`` by elements. CUDA has a
kernel for a right operand with one axis that is not 1, which runs as fast as memory allows; the one
for any broadcast divides by the size of each axis for each element. Views cost nothing, and nodes
between two that are joined alike are joined with them, so that none is needed there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify.redundant import remove_dead_nodes

_COMMUTATIVE = ("Add", "Mul")
_BROADCASTING = (*_COMMUTATIVE, "Sub", "Div", "Where")
_ELEMENTWISE = (
    *_BROADCASTING,
    *("Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Log", "Max", "Min", "Neg", "Pow", "Reciprocal"),
    *("Relu", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sum", "Tanh"),
)
_Dims = tuple[Dim, ...]


def flat_broadcasts(model: ir.Model, op: OpBuilder) -> int:
    """Join axes of nodes that broadcast; return how many nodes changed."""
    remove_dead_nodes(op.graph)  # what earlier passes left counts as no reader
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    forms = _forms(nodes(op.graph, *_ELEMENTWISE))
    views: dict[tuple[ir.Value, _Dims], ir.Value] = {}
    for node, form in forms.items():
        _turn(op, node, form, views, following[node])
    return len(forms) + sum(_full_first(n) for n in nodes(op.graph, *_COMMUTATIVE))


@dataclasses.dataclass(frozen=True)
class _Form:
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


def _forms(candidates: Sequence[ir.Node]) -> dict[ir.Node, _Form]:
    """Return the nodes to change: those that broadcast, and what lies between two of them."""
    seeds = {n: f for n in candidates if (f := _form_of(n)) is not None}
    made: dict[ir.Value, list[_Form]] = collections.defaultdict(list)
    for node in candidates:
        own = [seeds[node]] if node in seeds else _passed_on(node, made)
        made[node.outputs[0]] = own
    wanted: dict[ir.Value, set[_Form]] = collections.defaultdict(set)
    chosen: dict[ir.Node, _Form] = {}
    for node in reversed(candidates):
        y = node.outputs[0]
        both = [f for f in made[y] if node in seeds or f in wanted[y]]
        if both and not y.is_graph_output():
            chosen[node] = both[0]
        reached = {seeds[node]} if node in seeds else {f for f in wanted[y] if _fits(node, f)}
        for x in node.inputs:
            if x is not None and S.dims_of(x) == S.dims_of(y):
                wanted[x] |= reached
    return {n: chosen[n] for n in candidates if n in chosen}


def _passed_on(node: ir.Node, made: dict[ir.Value, list[_Form]]) -> list[_Form]:
    """Return the forms that operands of a node have, if it can have them, too."""
    dims = S.dims_of(node.outputs[0])
    given = [f for x in node.inputs if x is not None and x in made for f in made[x]]
    return [f for f in dict.fromkeys(given) if f.dims == dims and _fits(node, f)]


def _fits(node: ir.Node, form: _Form) -> bool:
    operands = [S.dims_of(x) for x in node.inputs if x is not None]
    return all(d is not None and form.joined(d) is not None for d in operands)


def _form_of(node: ir.Node) -> _Form | None:
    """Return how a node's axes are joined where that makes a faster kernel or fewer axes."""
    y = node.outputs[0]
    dims = S.dims_of(y)
    operands = [S.dims_of(x) for x in node.inputs if x is not None]
    if not is_op(node, *_BROADCASTING) or dims is None or None in dims or y.is_graph_output():
        return None
    if math.prod(d for d in dims if isinstance(d, int)) < T.FLAT_ELEMENTS or _opens(dims) > 1:
        return None
    known = [d for d in operands if d is not None and None not in d]
    spread = [d for d in known if d != dims and any(n != 1 for n in d)]
    if len(known) < len(operands) or not spread or _is_fast(node, known, spread):
        return None
    groups = _groups(dims, spread)
    form = None if len(groups) == len(dims) else _Form(dims, groups)
    return form if form is not None and _fits(node, form) and not _is_fused(node) else None


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


def _turn(
    op: OpBuilder,
    node: ir.Node,
    form: _Form,
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
    back = op.Reshape(y, _sizes(form.dims))
    S.set_dims(back, form.dims)
    for reader, index in uses:
        reader.replace_input_with(index, back)
    views[back, flat] = y


def _view(op: OpBuilder, x: ir.Value, dims: _Dims) -> ir.Value:
    array = S.constant_of(x) if S.is_own_constant(x) else None
    if array is not None:
        return op.const(array.reshape(_sizes(dims)), x.dtype)
    view = op.Reshape(x, _sizes(dims))
    S.set_dims(view, dims)
    return view


def _full_first(node: ir.Node) -> int:
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


def _opens(dims: _Dims) -> int:
    return sum(not isinstance(d, int) for d in dims)


def _sizes(dims: _Dims) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in dims]


__all__ = ["flat_broadcasts"]
