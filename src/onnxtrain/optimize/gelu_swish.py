"""The slope of ``x sigmoid(x)`` in four nodes instead of six, of a gate ``x sigmoid(x) u`` too.

With ``s = sigmoid(x)`` and ``a = x s``: ``g s + (g x) (s (1 - s)) = g (s + a (1 - s))``. Neither
form overflows where the result does not: ``s (1 - s)`` and ``a (1 - s)`` vanish where ``x`` is far
from zero.

A gated layer has ``h = a u``, and ``g = d u``. Then ``g (s + a (1 - s)) = d (h + s (u - h))``, and
``d u`` is not needed. Its rounding grows with ``h / u = a``, as that of ``h`` itself.

GELU that an exporter wrote out, as the one operator it is.

Files spell it in many ways: by ``Erf`` or ``Tanh``, with ``Pow`` or products, halves in front or
behind. So it is not recognised by its spelling but by what it computes: a closed part of the graph
from one value to another, made of elementwise operators and numbers, is evaluated on a grid.

Slopes of GELU for bfloat16 by a table: a function of 16 bits has few values.

The gradient of GELU takes ten passes or more over the widest activations of a transformer, and each
rounds to 8 bits. Scaled by 2048 every bfloat16 of at least 1/16 is a whole number, so that a table
of these has its slope, rounded once; for smaller ones the middle of 1/2048 is nearer to it than one
rounding. Beyond 7.97 slopes are 0 or 1. So six passes are left: scale, two bounds, whole numbers,
the table and the product with the gradient. Negative numbers count from the end of the table.

Whole numbers have no gradient, so this is for graphs that nobody differentiates again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes, op_key
from onnxtrain.graph.shapes import dims as D
from onnxtrain.modes.mixed_precision import (
    GELU_TANH_DERIVATIVE,
    TWICE_GELU_DERIVATIVE,
    derivative_kind,
)

_WIDE = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def fuse_swish_grad(model: ir.Model, op: OpBuilder) -> int:
    """Join the two ways through a product with its own sigmoid; return how often."""
    changed, position = 0, op.position
    order = {node: i for i, node in enumerate(model.graph)}
    for node in nodes(model.graph, "Sigmoid"):
        changed += sum(
            _fuse_branches(op, node, use.node, order) for use in list(node.outputs[0].uses())
        )
    op.position = position
    return changed


def _fuse_branches(
    op: OpBuilder, sigmoid: ir.Node, reader: ir.Node, order: dict[ir.Node, int]
) -> int:
    """Replace the sum that ``reader`` is a term of, if it is the gradient of ``x sigmoid(x)``."""
    x, s = sigmoid.inputs[0], sigmoid.outputs[0]
    g = _other(reader, s)
    if x is None or g is None or _plain(g) is _plain(x) or g is s:
        return 0
    a = next((n.outputs[0] for n, _ in s.uses() if _plain(_other(n, s)) is _plain(x)), None)
    total = _only_reader(reader.outputs[0])
    if a is None or total is None or not is_op(total, "Add"):
        return 0
    term = next((v for v in total.inputs if v is not reader.outputs[0]), None)
    product = None if term is None or _only_reader(term) is not total else term.producer()
    if product is None or not _is_sigmoid_branch(product, g, x, s):
        return 0
    y = total.outputs[0]
    uses = list(y.uses())
    op.position = total
    gate = _gate(g, a, total, order)
    if gate is None:
        slope = op.Add(s, op.Mul(a, op.Sub(op.const(1.0, x.dtype), s)))
    else:
        g, u, h = gate
        slope = op.Add(h, op.Mul(s, op.Sub(u, h)))
    replace_value(y, op.Mul(g, slope), uses)
    return 1


def _gate(
    g: ir.Value, a: ir.Value, total: ir.Node, order: dict[ir.Node, int]
) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return ``d``, ``u`` and ``h`` where ``g = d u`` is read by nothing else, and ``h = a u``."""
    product = g.producer()
    if product not in order or not is_op(product, "Mul"):
        return None
    if g.dtype not in _WIDE or len(g.uses()) != 2 or g.is_graph_output():
        return None
    for d, u in (tuple(product.inputs), tuple(reversed(product.inputs))):
        if d is None or u is None or not (S.same_shape(d, g) and S.same_shape(u, g)):
            continue
        for node, _ in a.uses():
            if _other(node, a) is u and order.get(node, len(order)) < order[product]:
                return (d, u, node.outputs[0]) if total.graph is node.graph else None
    return None


def _is_sigmoid_branch(node: ir.Node, g: ir.Value, x: ir.Value, s: ir.Value) -> bool:
    """Return whether a node gives ``(g x) (s (1 - s))``."""
    if not is_op(node, "Mul"):
        return False
    for first, second in (tuple(node.inputs), tuple(reversed(node.inputs))):
        upper, slope = (None if v is None else v.producer() for v in (first, second))
        if upper is None or slope is None or _plain(_other(upper, g)) is not _plain(x):
            continue
        rest = _other(slope, s)
        lower = None if rest is None else rest.producer()
        if lower is not None and is_op(lower, "Sub") and lower.inputs[1] is s:
            one = S.constant_of(lower.inputs[0])
            if one is not None and one.size == 1 and float(one.item()) == 1.0:
                return True
    return False


def _other(node: ir.Node, x: ir.Value) -> ir.Value | None:
    """Return what a product of two multiplies ``x`` by."""
    if not is_op(node, "Mul") or x not in node.inputs:
        return None
    return node.inputs[1] if node.inputs[0] is x else node.inputs[0]


def _plain(x: ir.Value | None) -> ir.Value | None:
    """Return ``x`` of ``Where(c, x, x)``, which holds back what is computed again."""
    node = None if x is None else x.producer()
    if node is None or not is_op(node, "Where") or node.inputs[1] is not node.inputs[2]:
        return x
    return _plain(node.inputs[1])


def _only_reader(x: ir.Value) -> ir.Node | None:
    uses = list(x.uses())
    return uses[0].node if len(uses) == 1 and not x.is_graph_output() else None


_DEPTH = 7
_GRID = np.linspace(-6.0, 6.0, 97)
_ERF = np.vectorize(math.erf)
_EVALUATE: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Cast": lambda x: x,
    "Div": np.divide,
    "Erf": _ERF,
    "Identity": lambda x: x,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Pow": np.power,
    "Sub": np.subtract,
    "Tanh": np.tanh,
}
_GELU_BY_ERF = 0.5 * _GRID * (1.0 + _ERF(_GRID / math.sqrt(2.0)))
_GELU_BY_TANH = (
    0.5 * _GRID * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (_GRID + 0.044715 * _GRID**3)))
)


def fuse_gelu(model: ir.Model, op: OpBuilder) -> int:
    """Put a Gelu in the place of what computes one; return how many there were."""
    return sum(_fold(op, node) for node in nodes(model.graph, "Erf", "Tanh"))


def _fold(op: OpBuilder, bend: ir.Node) -> int:
    if bend.graph is not op.graph:  # part of one that is folded already
        return 0
    for y in _results(bend):
        for x in _sources(bend):
            region = _region(x, y)
            if region is None or x.dtype != y.dtype or y.is_graph_output():
                continue  # callers hold on to outputs
            kind = _kind(x, y, region)
            if kind is None:
                continue
            last = y.producer()
            assert last is not None
            uses = list(y.uses())
            op.position = last
            folded = op.Gelu(x, approximate=kind)
            node = folded.producer()
            assert node is not None
            node.name = last.name  # its scope says to which block it belongs
            node.metadata_props.update(last.metadata_props)
            replace_value(y, folded, uses)
            op.graph.remove(region, safe=True)
            return 1
    return 0


def _results(bend: ir.Node) -> Iterator[ir.Value]:
    """Return what may be the result: values on the only way that leads on from a node."""
    y = bend.outputs[0]
    for _ in range(_DEPTH):
        uses = list(y.uses())
        if len(uses) != 1 or y.is_graph_output() or not _simple(uses[0].node):
            return
        y = uses[0].node.outputs[0]
        yield y


def _sources(bend: ir.Node) -> Iterator[ir.Value]:
    """Return what may be the argument: values above a node, the nearest ones first."""
    level: list[ir.Value] = [x for x in bend.inputs if x is not None]
    for _ in range(_DEPTH):
        above: list[ir.Value] = []
        for x in level:
            if S.constant_of(x) is None:
                yield x
                node = x.producer()
                if node is not None and _simple(node):
                    above += [v for v in node.inputs if v is not None]
        level = list(dict.fromkeys(above))


def _simple(node: ir.Node) -> bool:
    return is_op(node, *_EVALUATE)


def _region(x: ir.Value, y: ir.Value) -> list[ir.Node] | None:
    """Return the nodes between two values if they read nothing else and nothing else reads them."""
    inside: list[ir.Node] = []
    wanted, known = [y], {x}
    while wanted:
        v = wanted.pop()
        if v in known or _is_number(v):
            continue
        known.add(v)
        node = v.producer()
        if node is None or not _simple(node) or len(inside) > 2 * _DEPTH:
            return None
        inside.append(node)
        wanted += [i for i in node.inputs if i is not None]
    nodes_inside = set(inside)
    for node in inside:
        out = node.outputs[0]
        if out is y:
            continue
        if out.is_graph_output() or any(use.node not in nodes_inside for use in out.uses()):
            return None
    return inside


def _is_number(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1


def _kind(x: ir.Value, y: ir.Value, region: list[ir.Node]) -> str | None:
    """Return which approximation a part of the graph is, if it is one at all."""
    values: dict[ir.Value, np.ndarray] = {x: _GRID}

    def value(v: ir.Value) -> np.ndarray:
        if v not in values:
            number = S.constant_of(v)
            if number is not None:
                values[v] = np.asarray(number, np.float64).reshape(())
            else:
                node = v.producer()
                assert node is not None
                operands = [value(i) for i in node.inputs if i is not None]
                values[v] = _EVALUATE[op_key(node)](*operands)
        return values[v]

    with np.errstate(all="ignore"):
        result = value(y)
    for kind, wanted in (("none", _GELU_BY_ERF), ("tanh", _GELU_BY_TANH)):
        if result.shape == wanted.shape and np.allclose(result, wanted, rtol=1e-5, atol=1e-6):
            return kind
    return None


_STEPS = 2048
_BOUND = 255 * 64
"""The last step, a bfloat16; 7.97 is where slopes are 0 or 1 in 16 bits."""
_IDENTITY_STEPS = _STEPS // 16
"""From this step on, each bfloat16 is a whole number of steps."""


def gelu_grad_lookup_table(model: ir.Model, op: OpBuilder) -> int:
    """Look marked slopes of large tensors up, in place; return how many."""
    tables: dict[str, ir.Value] = {}
    return sum(_replace_by_lookup(op, node, tables) for node in nodes(op.graph, "Add"))


def _replace_by_lookup(op: OpBuilder, node: ir.Node, tables: dict[str, ir.Value]) -> int:
    slope = node.outputs[0]
    kind = derivative_kind(slope)
    x = _argument(node) if kind in _FUNCTIONS else None
    if kind is None or x is None or slope.is_graph_output() or not _is_gelu(x, kind):
        return 0
    sizes = D.static_sizes(S.dims_of(slope) or (None,))
    if sizes is None or math.prod(sizes) < T.MEMORY_BOUND_ELEMENTS or not S.same_shape(x, slope):
        return 0
    uses = list(slope.uses())
    op.position = node
    if kind not in tables:
        tables[kind] = op.const(_table(kind), ir.DataType.BFLOAT16)
    steps = op.Min(op.Mul(x, float(_STEPS)), float(_BOUND))
    places = op.Cast(op.Max(steps, -float(_BOUND)), to=ir.DataType.INT32)
    replace_value(slope, op.Gather(tables[kind], places, axis=0), uses)
    return 1


def _argument(node: ir.Node) -> ir.Value | None:
    """Return what the slope is one at: ``x`` of ``Sigmoid(x ...)`` or of ``Erf(x ...) + 1``."""
    below = node.inputs[0]
    made = None if below is None else below.producer()
    if made is not None and is_op(made, "Add"):
        below = made.inputs[0]
        made = None if below is None else below.producer()
    if made is None or not is_op(made, "Sigmoid", "Erf"):
        return None
    inner = made.inputs[0]
    product = None if inner is None else inner.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    x = product.inputs[0]
    return x if x is not None and x.dtype == ir.DataType.BFLOAT16 else None


def _is_gelu(x: ir.Value, kind: str) -> bool:
    """Return whether a Gelu of that kind reads a value."""
    wanted = "tanh" if kind == GELU_TANH_DERIVATIVE else "none"
    for use in x.uses():
        if is_op(use.node, "Gelu"):
            given = use.node.attributes.get("approximate")
            if (given.as_string() if given is not None else "none") == wanted:
                return True
    return False


@functools.cache
def _table(kind: str) -> np.ndarray:
    """Return slopes at whole steps, those below zero from the end."""
    step = np.arange(-_BOUND, _BOUND + 1)
    inside = (abs(step) < _IDENTITY_STEPS) & (step != 0)
    x = (step + np.where(inside, np.sign(step) * 0.5, 0.0)) / _STEPS
    slopes = _FUNCTIONS[kind](x)
    return np.concatenate([slopes[_BOUND:], slopes[:_BOUND]]).astype(ml_dtypes.bfloat16)


def _tanh_derivative(x: np.ndarray) -> np.ndarray:
    c, k = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
    below = 1.0 / (1.0 + np.exp(-c * (x + k * x**3)))
    return below + x * below * (1.0 - below) * c * (1.0 + 3.0 * k * x**2)


def _erf_derivative_twice(x: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(v) for v in x * math.sqrt(0.5)])
    return 1.0 + erf + 2.0 * x * np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)


_FUNCTIONS = {GELU_TANH_DERIVATIVE: _tanh_derivative, TWICE_GELU_DERIVATIVE: _erf_derivative_twice}
