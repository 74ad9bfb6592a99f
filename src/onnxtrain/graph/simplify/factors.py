"""Numbers that gradients are multiplied by one after the other become one number.

``-(u * 0.5) / s * (1 / n) * 2 * x`` is ``u * (-1 / n) / s * x``: a factor passes through products,
quotients, sums and views. Then ``sum(u) / n`` is a mean, ``a + (-m) x`` is ``a - m x``, and
``u / s * x`` is ``u`` times the quotient ``x / s`` that the forward pass has. Only constants that
this library put in are joined, so that what a model computes stays as it was; sums of gradients
round differently in the last bit.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, is_standard
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes

_WIDE_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
_LINEAR_OPS = frozenset(
    {
        *("Div", "Expand", "Flatten", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    }
)
"""What a factor of the first input passes through."""
_MIN_FACTOR, _MAX_FACTOR = 1e-12, 1e12
_MAX_DEPTH = 8


def fold_scale_chains(model: ir.Model, op: OpBuilder) -> int:
    """Join factors along chains of nodes, in place; return how many nodes became needless."""
    changes = 0
    remove_dead_nodes(model.graph)
    for node in list(model.graph):
        changes += _fold(node, op)
    for node in list(model.graph):
        changes += _fold_into_mean(node)
    remove_dead_nodes(model.graph)
    index = {node: i for i, node in enumerate(model.graph)}
    for node in list(model.graph):
        if is_op(node, "Mul"):
            changes += _reuse_quotient(node, index)
    return changes


def _factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return ``x`` and ``c`` if the node is ``c * x`` with a number of ours."""
    if not is_standard(node) or len(node.outputs) != 1 or node.outputs[0].dtype not in _WIDE_DTYPES:
        return None
    y = node.outputs[0]
    if node.op_type == "Neg" and node.inputs[0] is not None:
        return node.inputs[0], -1.0
    if node.op_type not in ("Mul", "Div"):
        return None
    for i in (1, 0) if node.op_type == "Mul" else (1,):
        number, x = node.inputs[i], node.inputs[1 - i]
        if number is None or x is None or not S.is_generated_constant(number):
            continue
        array = S.constant_of(number)
        if array is None or array.size != 1 or not S.same_shape(x, y):
            continue
        value = float(array.item())
        if math.isfinite(value) and value:
            return x, value if node.op_type == "Mul" else 1.0 / value
    return None


def _fold(node: ir.Node, op: OpBuilder) -> int:
    """Let a factor further up the chain take this one; give 1 if there is one."""
    given, y = _factor(node), node.outputs[0]
    if given is None or y.is_graph_output() or not y.uses():
        return 0
    x, number = given
    inner = _upstream(x, node, _MAX_DEPTH)
    known = None if inner is None else _factor(inner)
    if inner is None or known is None:
        return 0
    source, first = known
    if not _MIN_FACTOR < abs(first * number) < _MAX_FACTOR:
        return 0
    inner.op_type = "Mul"
    inner.resize_inputs(2)
    inner.replace_input_with(0, source)
    inner.replace_input_with(1, op.const(first * number, y.dtype))
    _bypass(node, x)
    return 1


def _bypass(node: ir.Node, x: ir.Value) -> None:
    """Let ``x`` stand for the node's output; the node is dead, and reads nothing any more."""
    node.outputs[0].replace_all_uses_with(x)
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def _upstream(x: ir.Value, node: ir.Node, depth: int) -> ir.Node | None:
    """Return the nearest node above that multiplies by a number, if nothing else reads the way."""
    before = x.producer()
    if before is None or before.graph is not node.graph or not is_standard(before):
        return None
    if len(x.uses()) != 1 or x.is_graph_output() or not depth:
        return None
    if _factor(before) is not None:
        return before
    if before.op_type not in _LINEAR_OPS and before.op_type != "Mul":
        return None
    for source in before.inputs[: 2 if before.op_type == "Mul" else 1]:
        way = None if source is None else _upstream(source, before, depth - 1)
        if way is not None:
            return way
    return None


def _fold_into_mean(node: ir.Node) -> int:
    """``sum(u) * (1 / n)`` is the mean of ``u``; a minus goes into the sum further down."""
    given, y = _factor(node), node.outputs[0]
    if given is None or y.is_graph_output():
        return 0
    total, number = given
    reduce = total.producer()
    if reduce is None or not is_op(reduce, "ReduceSum") or reduce.graph is not node.graph:
        return 0
    count = _reduced_elements(reduce)
    if len(total.uses()) != 1 or total.is_graph_output() or count is None:
        return 0
    if abs(abs(number) * count - 1.0) > 1e-6:
        return 0
    if number < 0 and not _negate_below(node):
        return 0
    reduce.op_type = "ReduceMean"
    _bypass(node, total)
    return 1


def _reduced_elements(node: ir.Node) -> int | None:
    """Return how many elements each sum has."""
    dims = None if node.inputs[0] is None else S.dims_of(node.inputs[0])
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if dims is None or axes is None or not axes.size:
        return None
    sizes = [dims[int(a)] for a in axes.reshape(-1)]
    return math.prod(s for s in sizes if isinstance(s, int)) if _all_static(sizes) else None


def _all_static(sizes: list) -> bool:
    return all(isinstance(s, int) and s > 0 for s in sizes)


def _negate_below(node: ir.Node) -> bool:
    """Turn the sum that the node's output ends in into a difference, or the reverse."""
    value = node.outputs[0]
    for _ in range(_MAX_DEPTH):
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return False
        reader, at = uses[0]
        if reader.graph is not node.graph or not is_standard(reader):
            return False
        if reader.op_type == "Add" or (reader.op_type == "Sub" and at == 1):
            other = reader.inputs[1 - at]
            if other is value or other is None:
                return False
            reader.op_type = "Sub" if reader.op_type == "Add" else "Add"
            reader.replace_input_with(0, other)
            reader.replace_input_with(1, value)
            return True
        if reader.op_type != "Mul" and (reader.op_type not in _LINEAR_OPS or at):
            return False
        value = reader.outputs[0]
    return False


def _reuse_quotient(node: ir.Node, index: dict[ir.Node, int]) -> int:
    """``u / s * x = u * (x / s)``, where the graph has ``x / s``."""
    for i in (0, 1):
        quotient, x = node.inputs[i], node.inputs[1 - i]
        divide = None if quotient is None else quotient.producer()
        if divide is not None and is_op(divide, "Expand") and _is_only_reader(quotient, node):
            quotient = divide.inputs[0]
            divide = None if quotient is None else quotient.producer()
        if divide is None or x is None or not is_op(divide, "Div"):
            continue
        if divide.graph is not node.graph or node.outputs[0].dtype not in _WIDE_DTYPES:
            continue
        assert quotient is not None
        u, s = divide.inputs
        if u is None or s is None or u is x or not _is_only_reader(quotient, node):
            continue
        if S.same_shape(quotient, node.outputs[0]):
            continue  # a full-size quotient is worth as much as a full-size product
        known = next(
            (
                n.outputs[0]
                for n, at in s.uses()
                if at == 1 and is_op(n, "Div") and n.inputs[0] is x
                if index.get(n, len(index)) < index[node]
            ),
            None,
        )
        if known is not None and S.same_shape(known, node.outputs[0]):
            node.replace_input_with(i, u)
            node.replace_input_with(1 - i, known)
            return 1
    return 0


def _is_only_reader(x: ir.Value | None, node: ir.Node) -> bool:
    """Return whether one node of the same graph reads a value."""
    return x is not None and len(x.uses()) == 1 and not x.is_graph_output()
