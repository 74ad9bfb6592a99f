"""Rewrites of GELU and Swish: fuse the operator, and cheaper derivatives.

- `fuse_swish_grad`: the gradient of `x * sigmoid(x)`, also as a gate, in fewer elementwise passes.
- `fuse_gelu`: GELU that an exporter wrote as several operators becomes Gelu.
- `gelu_grad_lookup_table` (bfloat16): the derivative of GELU comes from a table.
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
from onnxtrain.graph.match import Pattern
from onnxtrain.graph.nodes import is_op, nodes, op_key
from onnxtrain.graph.shapes import dims as D
from onnxtrain.modes.mixed_precision import (
    GELU_TANH_DERIVATIVE,
    TWICE_GELU_DERIVATIVE,
    derivative_kind,
)

# The gradient of Swish.

_WIDE = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def fuse_swish_grad(model: ir.Model, op: OpBuilder) -> int:
    """Simplify gradients of `a = x s` with `s = sigmoid(x)`; return how many.

        before:  g s + (g x) (s (1 - s))
        after:   g (s + a (1 - s))
        gate:    d (h + s (u - h))        where h = a u and g = d u

    A gated layer computes `h = a u`, so that `g = d u`, which the last form does not need. Its
    rounding error grows with `h / u = a`, as that of `h` itself. No form overflows where the result
    does not: `s (1 - s)` and `a (1 - s)` vanish where `x` is far from zero.
    """
    changed, position = 0, op.position
    order = {node: i for i, node in enumerate(model.graph)}
    for node in nodes(model.graph, "Sigmoid"):
        changed += sum(_fuse_terms(op, use.node, order) for use in list(node.outputs[0].uses()))
    op.position = position
    return changed


def _without_identity_select(x: ir.Value) -> ir.Value:
    """Return `x` of `Where(c, x, x)`, which recomputation inserts to order its nodes."""
    node = x.producer()
    if node is None or not is_op(node, "Where") or node.inputs[1] is not node.inputs[2]:
        return x
    return x if node.inputs[1] is None else _without_identity_select(node.inputs[1])


def _swish(op, x):
    return op.Mul(x, op.Sigmoid(x))


def _swish_grad(op, x, g):
    s = op.Sigmoid(x).named("s")
    first = op.Mul(g, s).once().named("first")
    return op.Add(first, op.Mul(op.Mul(g, x), op.Mul(s, op.Sub(1.0, s))).once())


_SWISH = Pattern(_swish, source=_without_identity_select)
_SWISH_GRAD = Pattern(_swish_grad, source=_without_identity_select)


def _fuse_terms(op: OpBuilder, first: ir.Node, order: dict[ir.Node, int]) -> int:
    """Replace the sum whose first term is `first`, if it is the gradient of `x sigmoid(x)`."""
    total = _only_reader(first.outputs[0])
    grad = None if total is None else _SWISH_GRAD.match(total)
    if total is None or grad is None or grad["first"] is not first.outputs[0]:
        return 0
    x, s, g = grad["x"], grad["s"], grad["g"]
    swish = _SWISH.find_user(s, x=x)
    if swish is None or g is s or _without_identity_select(g) is _without_identity_select(x):
        return 0
    a, y = swish.root.outputs[0], total.outputs[0]
    uses = list(y.uses())
    op.position = total
    gate = _find_gate(g, a, total, order)
    if gate is None:
        derivative = op.Add(s, op.Mul(a, op.Sub(op.const(1.0, x.dtype), s)))
    else:
        g, u, h = gate
        derivative = op.Add(h, op.Mul(s, op.Sub(u, h)))
    replace_value(y, op.Mul(g, derivative), uses)
    return 1


def _find_gate(
    g: ir.Value, a: ir.Value, total: ir.Node, order: dict[ir.Node, int]
) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return `d`, `u` and `h = a u` if `g = d u` has no other readers than the gradient."""
    product = g.producer()
    if product not in order or not is_op(product, "Mul"):
        return None
    if g.dtype not in _WIDE or len(g.uses()) != 2 or g.is_graph_output():
        return None
    for d, u in (tuple(product.inputs), tuple(reversed(product.inputs))):
        if d is None or u is None or not (S.same_shape(d, g) and S.same_shape(u, g)):
            continue
        for node, _ in a.uses():
            if _factor_of(node, a) is u and order.get(node, len(order)) < order[product]:
                return (d, u, node.outputs[0]) if total.graph is node.graph else None
    return None


def _factor_of(node: ir.Node, x: ir.Value) -> ir.Value | None:
    """Return what a Mul multiplies `x` by."""
    if not is_op(node, "Mul") or x not in node.inputs:
        return None
    return node.inputs[1] if node.inputs[0] is x else node.inputs[0]


def _only_reader(x: ir.Value) -> ir.Node | None:
    uses = list(x.uses())
    return uses[0].node if len(uses) == 1 and not x.is_graph_output() else None


# GELU as one operator.

_MAX_DEPTH = 7
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
    """Replace subgraphs that compute GELU with Gelu; return how many.

    Exporters write GELU in many ways: with Erf or Tanh, Pow or Mul, the factor 0.5 first or last.
    So subgraphs are not matched by their operators but evaluated: every subgraph of elementwise
    operators and constants around an Erf or a Tanh is compared with GELU on a grid.
    """
    return sum(_fuse_around(op, node) for node in nodes(model.graph, "Erf", "Tanh"))


def _fuse_around(op: OpBuilder, nonlinearity: ir.Node) -> int:
    if nonlinearity.graph is not op.graph:  # removed together with an earlier match
        return 0
    for y in _possible_outputs(nonlinearity):
        for x in _possible_inputs(nonlinearity):
            region = _region(x, y)
            if region is None or x.dtype != y.dtype or y.is_graph_output():
                continue  # callers hold on to output values
            kind = _approximation(x, y, region)
            if kind is None:
                continue
            last = y.producer()
            assert last is not None
            uses = list(y.uses())
            op.position = last
            gelu = op.Gelu(x, approximate=kind)
            node = gelu.producer()
            assert node is not None
            node.name = last.name  # recomputation reads the block from the scope in the name
            node.metadata_props.update(last.metadata_props)
            replace_value(y, gelu, uses)
            op.graph.remove(region, safe=True)
            return 1
    return 0


def _possible_outputs(nonlinearity: ir.Node) -> Iterator[ir.Value]:
    """Yield values after a node, as long as each has one reader."""
    y = nonlinearity.outputs[0]
    for _ in range(_MAX_DEPTH):
        uses = list(y.uses())
        if len(uses) != 1 or y.is_graph_output() or not _is_evaluable(uses[0].node):
            return
        y = uses[0].node.outputs[0]
        yield y


def _possible_inputs(nonlinearity: ir.Node) -> Iterator[ir.Value]:
    """Yield values before a node, the nearest first."""
    level: list[ir.Value] = [x for x in nonlinearity.inputs if x is not None]
    for _ in range(_MAX_DEPTH):
        above: list[ir.Value] = []
        for x in level:
            if S.constant_of(x) is None:
                yield x
                node = x.producer()
                if node is not None and _is_evaluable(node):
                    above += [v for v in node.inputs if v is not None]
        level = list(dict.fromkeys(above))


def _is_evaluable(node: ir.Node) -> bool:
    return is_op(node, *_EVALUATE)


def _region(x: ir.Value, y: ir.Value) -> list[ir.Node] | None:
    """Return the nodes between two values, if these read and feed nothing else."""
    inside: list[ir.Node] = []
    pending, visited = [y], {x}
    while pending:
        v = pending.pop()
        if v in visited or _is_scalar_constant(v):
            continue
        visited.add(v)
        node = v.producer()
        if node is None or not _is_evaluable(node) or len(inside) > 2 * _MAX_DEPTH:
            return None
        inside.append(node)
        pending += [i for i in node.inputs if i is not None]
    nodes_inside = set(inside)
    for node in inside:
        out = node.outputs[0]
        if out is y:
            continue
        if out.is_graph_output() or any(use.node not in nodes_inside for use in out.uses()):
            return None
    return inside


def _is_scalar_constant(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1


def _approximation(x: ir.Value, y: ir.Value, region: list[ir.Node]) -> str | None:
    """Return Gelu's `approximate` for a subgraph, or None if it does not compute GELU."""
    values: dict[ir.Value, np.ndarray] = {x: _GRID}

    def value(v: ir.Value) -> np.ndarray:
        if v not in values:
            constant = S.constant_of(v)
            if constant is not None:
                values[v] = np.asarray(constant, np.float64).reshape(())
            else:
                node = v.producer()
                assert node is not None
                operands = [value(i) for i in node.inputs if i is not None]
                values[v] = _EVALUATE[op_key(node)](*operands)
        return values[v]

    with np.errstate(all="ignore"):
        result = value(y)
    for kind, gelu in (("none", _GELU_BY_ERF), ("tanh", _GELU_BY_TANH)):
        if result.shape == gelu.shape and np.allclose(result, gelu, rtol=1e-5, atol=1e-6):
            return kind
    return None


# The derivative of GELU from a table.

_STEPS = 2048  # table entries per unit of x
_BOUND = 255 * 64  # last entry, x = 7.97, a bfloat16: from there the derivative is 0 or 1
_EXACT_FROM = _STEPS // 16  # from this entry on, every bfloat16 is a whole number of steps


def gelu_grad_lookup_table(model: ir.Model, op: OpBuilder) -> int:
    """Replace derivatives of GELU of large bfloat16 tensors with table lookups; return how many.

        before:  ten or more elementwise passes, each rounded to 8 bits
        after:   Gather(table, Cast(Clip(2048 x), int32))

    `2048 x` is a whole number for every bfloat16 of at least 1/16, so the table is exact up to one
    rounding. Below 1/16, the middle of a step is closer than one rounding. Negative indices count
    from the end of the table.

    The cast to integers has no gradient, so this is for graphs that are not differentiated again.
    """
    tables: dict[str, ir.Value] = {}
    return sum(_replace_by_lookup(op, node, tables) for node in nodes(op.graph, "Add"))


def _replace_by_lookup(op: OpBuilder, node: ir.Node, tables: dict[str, ir.Value]) -> int:
    derivative = node.outputs[0]
    kind = derivative_kind(derivative)
    x = _gelu_input(node) if kind in _FUNCTIONS else None
    if kind is None or x is None or derivative.is_graph_output() or not _has_gelu(x, kind):
        return 0
    sizes = D.static_sizes(S.dims_of(derivative) or (None,))
    if sizes is None or math.prod(sizes) < T.MEMORY_BOUND_ELEMENTS:
        return 0
    if not S.same_shape(x, derivative):
        return 0
    uses = list(derivative.uses())
    op.position = node
    if kind not in tables:
        tables[kind] = op.const(_table(kind), ir.DataType.BFLOAT16)
    steps = op.Min(op.Mul(x, float(_STEPS)), float(_BOUND))
    index = op.Cast(op.Max(steps, -float(_BOUND)), to=ir.DataType.INT32)
    replace_value(derivative, op.Gather(tables[kind], index, axis=0), uses)
    return 1


def _gelu_input(node: ir.Node) -> ir.Value | None:
    """Return `x` if a derivative starts with `Sigmoid(x ...)` or `Erf(x ...) + 1`."""
    operand = node.inputs[0]
    inner = None if operand is None else operand.producer()
    if inner is not None and is_op(inner, "Add"):
        operand = inner.inputs[0]
        inner = None if operand is None else operand.producer()
    if inner is None or not is_op(inner, "Sigmoid", "Erf"):
        return None
    argument = inner.inputs[0]
    product = None if argument is None else argument.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    x = product.inputs[0]
    return x if x is not None and x.dtype == ir.DataType.BFLOAT16 else None


def _has_gelu(x: ir.Value, kind: str) -> bool:
    """Return whether a Gelu with this derivative reads a value."""
    approximate = "tanh" if kind == GELU_TANH_DERIVATIVE else "none"
    return any(
        is_op(use.node, "Gelu")
        and use.node.attributes.get_string("approximate", "none") == approximate
        for use in x.uses()
    )


@functools.cache
def _table(kind: str) -> np.ndarray:
    """Return derivatives at all steps from 0 to the bound, then from minus the bound to -1."""
    step = np.arange(-_BOUND, _BOUND + 1)
    inside = (abs(step) < _EXACT_FROM) & (step != 0)
    x = (step + np.where(inside, np.sign(step) * 0.5, 0.0)) / _STEPS
    values = _FUNCTIONS[kind](x)
    return np.concatenate([values[_BOUND:], values[:_BOUND]]).astype(ml_dtypes.bfloat16)


def _tanh_derivative(x: np.ndarray) -> np.ndarray:
    c, k = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
    s = 1.0 / (1.0 + np.exp(-c * (x + k * x**3)))
    return s + x * s * (1.0 - s) * c * (1.0 + 3.0 * k * x**2)


def _erf_derivative_twice(x: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(v) for v in x * math.sqrt(0.5)])
    return 1.0 + erf + 2.0 * x * np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)


_FUNCTIONS = {GELU_TANH_DERIVATIVE: _tanh_derivative, TWICE_GELU_DERIVATIVE: _erf_derivative_twice}
