"""Merge the constant factors along a chain of gradient operators into one.

Gradient rules compose to chains of scalar multiplications. A factor commutes with products,
quotients, sums and views::

    before:  -(u * 0.5) / s * (1 / n) * 2 * x
    after:   u * (-1 / n) / s * x

Then three rewrites apply::

    before:  sum(u) * (1 / n)      a + (-m) * x      u / s * x, with x / s computed elsewhere
    after:   mean(u)               a - m * x         u * (x / s)

Only constants that onnxtrain added are merged: the forward pass of the user's model keeps its
bits. Gradients may round differently in the last bit.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, is_standard
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes

_WIDE_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
_LINEAR_OPS = frozenset(
    {
        *("Div", "Expand", "Flatten", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    }
)
"""Operators that are linear in their first input, so that a factor moves through them."""
_MIN_FACTOR, _MAX_FACTOR = 1e-12, 1e12  # merged factors stay far from float32 under- and overflow
_MAX_DEPTH = 8  # nodes between two factors


def fold_scale_chains(model: ir.Model, op: OpBuilder) -> int:
    """Merge constant factors along chains of nodes, in place; return the number of nodes saved."""
    changes = 0
    remove_dead_nodes(model.graph)
    for node in list(model.graph):
        changes += _fold(node, op)
    for node in list(model.graph):
        changes += _fold_into_mean(node)
    remove_dead_nodes(model.graph)
    position = {node: i for i, node in enumerate(model.graph)}
    for node in list(model.graph):
        if is_op(node, "Mul"):
            changes += _reuse_quotient(node, position)
    return changes


def _factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return ``x`` and ``c`` if a node computes ``c * x`` with a constant that onnxtrain added."""
    if not is_standard(node) or len(node.outputs) != 1 or node.outputs[0].dtype not in _WIDE_DTYPES:
        return None
    y = node.outputs[0]
    if node.op_type == "Neg" and node.inputs[0] is not None:
        return node.inputs[0], -1.0
    if node.op_type not in ("Mul", "Div"):
        return None
    for i in (1, 0) if node.op_type == "Mul" else (1,):
        constant, x = node.inputs[i], node.inputs[1 - i]
        if constant is None or x is None or not S.is_generated_constant(constant):
            continue
        array = S.constant_of(constant)
        if array is None or array.size != 1 or not S.same_shape(x, y):
            continue
        value = float(array.item())
        if math.isfinite(value) and value:
            return x, value if node.op_type == "Mul" else 1.0 / value
    return None


def _fold(node: ir.Node, op: OpBuilder) -> int:
    """Merge a node's factor into a factor further up the chain; return 1 if there is one."""
    outer_factor, y = _factor(node), node.outputs[0]
    if outer_factor is None or y.is_graph_output() or not y.uses():
        return 0
    x, outer = outer_factor
    inner_node = _upstream_factor(x, node, _MAX_DEPTH)
    inner_factor = None if inner_node is None else _factor(inner_node)
    if inner_node is None or inner_factor is None:
        return 0
    source, inner = inner_factor
    if not _MIN_FACTOR < abs(inner * outer) < _MAX_FACTOR:
        return 0
    inner_node.op_type = "Mul"
    inner_node.resize_inputs(2)
    inner_node.replace_input_with(0, source)
    inner_node.replace_input_with(1, op.const(inner * outer, y.dtype))
    _bypass(node, x)
    return 1


def _bypass(node: ir.Node, x: ir.Value) -> None:
    """Replace the node's output by ``x`` and disconnect the dead node from its inputs."""
    node.outputs[0].replace_all_uses_with(x)
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def _upstream_factor(x: ir.Value, node: ir.Node, depth: int) -> ir.Node | None:
    """Return the nearest factor that ``x`` depends on, if nothing else reads the values between."""
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
        factor = None if source is None else _upstream_factor(source, before, depth - 1)
        if factor is not None:
            return factor
    return None


def _fold_into_mean(node: ir.Node) -> int:
    """Replace ``sum(u) * (1 / n)`` by ``mean(u)``; a minus sign moves into a later Add or Sub."""
    total_and_factor, y = _factor(node), node.outputs[0]
    if total_and_factor is None or y.is_graph_output():
        return 0
    total, factor = total_and_factor
    reduce = total.producer()
    if reduce is None or not is_op(reduce, "ReduceSum") or reduce.graph is not node.graph:
        return 0
    count = _reduced_elements(reduce)
    if len(total.uses()) != 1 or total.is_graph_output() or count is None:
        return 0
    if abs(abs(factor) * count - 1.0) > 1e-6:
        return 0
    if factor < 0 and not _negate_downstream(node):
        return 0
    reduce.op_type = "ReduceMean"
    _bypass(node, total)
    return 1


def _reduced_elements(node: ir.Node) -> int | None:
    """Return the number of elements per sum of a ReduceSum; ``None`` if it is not static."""
    dims = None if node.inputs[0] is None else S.dims_of(node.inputs[0])
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if dims is None or axes is None or not axes.size:
        return None
    sizes = D.static_sizes([dims[int(a)] for a in axes.reshape(-1)])
    return math.prod(sizes) if sizes is not None and min(sizes) > 0 else None


def _negate_downstream(node: ir.Node) -> bool:
    """Negate the node's output where it is added: turn the Add into a Sub, or the reverse."""
    value = node.outputs[0]
    for _ in range(_MAX_DEPTH):
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return False
        reader, index = uses[0]
        if reader.graph is not node.graph or not is_standard(reader):
            return False
        if reader.op_type == "Add" or (reader.op_type == "Sub" and index == 1):
            other = reader.inputs[1 - index]
            if other is value or other is None:
                return False
            reader.op_type = "Sub" if reader.op_type == "Add" else "Add"
            reader.replace_input_with(0, other)
            reader.replace_input_with(1, value)
            return True
        if reader.op_type != "Mul" and (reader.op_type not in _LINEAR_OPS or index):
            return False
        value = reader.outputs[0]
    return False


def _reuse_quotient(node: ir.Node, position: dict[ir.Node, int]) -> int:
    """Replace ``u / s * x`` by ``u * (x / s)`` if an earlier node computes ``x / s``."""
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
            continue  # u / s has full size as well: the rewrite would save nothing
        x_over_s = next(
            (
                n.outputs[0]
                for n, operand in s.uses()
                if operand == 1 and is_op(n, "Div") and n.inputs[0] is x
                if position.get(n, len(position)) < position[node]
            ),
            None,
        )
        if x_over_s is not None and S.same_shape(x_over_s, node.outputs[0]):
            node.replace_input_with(i, u)
            node.replace_input_with(1 - i, x_over_s)
            return 1
    return 0


def _is_only_reader(x: ir.Value | None, node: ir.Node) -> bool:
    """Return whether nothing but ``node``, which reads ``x``, does so."""
    return x is not None and len(x.uses()) == 1 and not x.is_graph_output()
