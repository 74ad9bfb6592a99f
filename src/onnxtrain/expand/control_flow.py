"""Control flow as data flow: Scan and Loop unrolled, both branches of If computed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.expand.expansions import LOWERING, expansion
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import subgraphs_of

_MAX_UNROLLED_NODES = 512 * 64  # nodes of the body times steps


_MAX_STEPS = 256


@expansion("Scan", when=LOWERING)
def scan(
    op,
    *inputs,
    node,
    num_scan_inputs,
    scan_input_axes,
    scan_input_directions,
    scan_output_axes,
    scan_output_directions,
):
    """Unroll every step."""
    body = node.attributes["body"].as_graph()
    count = len(inputs) - num_scan_inputs
    states, scans = list(inputs[:count]), list(inputs[count:])
    axes = [a % op.rank(v) for a, v in zip(scan_input_axes or [0] * len(scans), scans, strict=True)]
    steps = op.dims(scans[0])[axes[0]] if scans else None
    if not isinstance(steps, int) or not _can_unroll(body, steps):
        return None
    turn = scan_input_directions or [0] * len(scans)
    ys: list[list[ir.Value]] = [[] for _ in body.outputs[count:]]
    for t in range(steps):
        now = []
        for v, axis, backwards in zip(scans, axes, turn, strict=True):
            i = steps - 1 - t if backwards else t
            now.append(op.Squeeze(op.Slice(v, [i], [i + 1], [axis]), [axis]))
        outputs = inline(op, body, [*states, *now])
        states = outputs[:count]
        for collected, y in zip(ys, outputs[count:], strict=True):
            collected.append(y)
    back = scan_output_directions or [0] * len(ys)
    where = scan_output_axes or [0] * len(ys)
    results = []
    for collected, backwards, axis in zip(ys, back, where, strict=True):
        parts = collected[::-1] if backwards else collected
        axis = axis % (op.rank(parts[0]) + 1)
        lifted = [op.Unsqueeze(p, [axis]) for p in parts]
        results.append(op.Concat(*lifted, axis=axis) if len(lifted) > 1 else lifted[0])
    return [*states, *results]


@expansion("Loop", when=LOWERING)
def loop(op, trips, condition=None, *carried, node):
    """Unroll every step, if the trip count is constant or the condition folds at each step."""
    body = node.attributes["body"].as_graph()
    count = None if trips is None else op.constant(trips)
    start = np.asarray(True) if condition is None else op.constant(condition)
    if start is None or (trips is not None and count is None):
        return None
    most = _MAX_STEPS if count is None else int(count.reshape(()))
    known = count is not None and _continues(op, body)
    if not _can_unroll(body, most if known else 1):
        return None
    going: np.ndarray | None = start
    states = list(carried)
    ys: list[list[ir.Value]] = [[] for _ in body.outputs[1 + len(states) :]]
    for t in range(most):
        if going is None:
            return None  # the condition depends on data
        if not bool(going):
            break
        flag, *outputs = inline(op, body, [op.const(t), op.const(True), *states])
        states = outputs[: len(states)]
        for collected, y in zip(ys, outputs[len(states) :], strict=True):
            collected.append(op.Unsqueeze(y, [0]))
        going = start if known else op.constant(flag)
    else:
        if count is None:
            return None  # too long to unroll
    if not all(ys):
        return None
    return [*states, *(op.Concat(*c, axis=0) for c in ys)]


def _continues(op: OpBuilder, body: ir.Graph) -> bool:
    flag: ir.Value | None = body.outputs[0]
    while flag is not None:
        if flag is body.inputs[1]:
            return True
        array = op.constant(flag)
        if array is not None:
            return bool(array)
        node = flag.producer()
        flag = node.inputs[0] if node is not None and node.op_type in ("Identity", "Cast") else None
    return False


def _can_unroll(body: ir.Graph, steps: int | str | None) -> bool:
    return (
        isinstance(steps, int)
        and 0 < steps <= _MAX_STEPS
        and steps * len(body) <= _MAX_UNROLLED_NODES
    )


@expansion("If", when=LOWERING)
def run_both_branches(op, condition, *, node):
    """Compute both branches and select each pair of outputs with Where.

    Only for outputs of equal shapes. An error in the branch that is not taken is an error here.
    """
    branches = [node.attributes[n].as_graph() for n in ("then_branch", "else_branch")]
    taken, other = (inline(op, branch, []) for branch in branches)
    scalar = condition if op.dims(condition) == () else op.Reshape(condition, [])
    selected = []
    for a, b in zip(taken, other, strict=True):
        if a.dtype != b.dtype or not S.same_shape(a, b):
            return None
        selected.append(a if a is b else op.Where(scalar, a, b))
    return selected


def inline(op: OpBuilder, body: ir.Graph, inputs: list[ir.Value]) -> list[ir.Value]:
    """Append a copy of the nodes of a body; return its outputs."""
    values: dict[ir.Value, ir.Value] = dict(zip(body.inputs, inputs, strict=True))
    for x in body.initializers.values():
        assert x.const_value is not None
        values[x] = op.const(x.const_value.numpy(), x.const_value.dtype)
    for node in body:
        if any(True for _ in subgraphs_of(node)):
            raise ShapeError("a body that contains control flow cannot be unrolled")
        new = ir.Node(
            node.domain,
            node.op_type,
            [None if x is None else values.get(x, x) for x in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
        )
        emitted = op.append(new)
        outputs = emitted if isinstance(emitted, tuple) else (emitted,)
        values |= dict(zip(node.outputs, outputs, strict=True))
    return [values.get(y, y) for y in body.outputs]
