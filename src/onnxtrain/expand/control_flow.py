"""Control flow as data flow: Scan and Loop unrolled, both branches of If computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.expand.expansions import LOWERING, expansion
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import subgraphs_of

_MAX_UNROLLED_NODES = 512 * 64  # nodes of the body times steps


_MAX_STEPS = 256

RECURRENT = "onnxtrain.recurrent"
"""Key in ``Node.meta`` of loops of recurrent layers and of their gradients."""


@expansion("Scan", when=LOWERING)
def scan(op, *inputs, node):
    """Unroll every step."""

    def split(x: ir.Value, axis: int, steps: int) -> list[ir.Value]:
        return [op.Squeeze(op.Slice(x, [t], [t + 1], [axis]), [axis]) for t in range(steps)]

    def join(parts: Sequence[ir.Value], axis: int) -> ir.Value:
        lifted = [op.Unsqueeze(p, [axis]) for p in parts]
        return op.Concat(*lifted, axis=axis) if len(lifted) > 1 else lifted[0]

    unrolled = unroll(op, node, inputs, split)
    if unrolled is None:
        return None
    return [*unrolled.states, *(join(parts, axis) for parts, axis in unrolled.stacks)]


class UnrolledScan(NamedTuple):
    """The results of a Scan: final states, and for each scan output its parts and their axis."""

    states: list[ir.Value]
    stacks: list[tuple[list[ir.Value], int]]


def unroll(
    op: OpBuilder,
    node: ir.Node,
    inputs: Sequence[ir.Value],
    split: Callable[[ir.Value, int, int], Sequence[ir.Value]],
    *,
    most_nodes: int = _MAX_UNROLLED_NODES,
) -> UnrolledScan | None:
    """Append a copy of a Scan's body for each step; ``None`` if the steps are unknown or too many.

    Args:
        op: the builder that receives the copies.
        node: the Scan.
        inputs: its inputs.
        split: returns the slices of a value along an axis, given their number.
        most_nodes: how many nodes the copies may have.
    """
    body = node.attributes["body"].as_graph()
    count = len(inputs) - node.attributes["num_scan_inputs"].as_int()
    states, scans = list(inputs[:count]), inputs[count:]
    axes_in = [
        a % op.rank(x)
        for a, x in zip(int_per_value(node, "scan_input_axes", scans), scans, strict=True)
    ]
    steps = op.dims(scans[0])[axes_in[0]] if scans else None
    if not isinstance(steps, int) or not _can_unroll(body, steps, most_nodes):
        return None
    turns = int_per_value(node, "scan_input_directions", scans)
    slices = [
        list(split(x, axis, steps))[:: -1 if turn else 1]
        for x, axis, turn in zip(scans, axes_in, turns, strict=True)
    ]
    stacks: list[list[ir.Value]] = [[] for _ in body.outputs[count:]]
    for now in zip(*slices, strict=True):
        outputs = inline(op, body, [*states, *now])
        states = outputs[:count]
        for parts, y in zip(stacks, outputs[count:], strict=True):
            parts.append(y)
    turns = int_per_value(node, "scan_output_directions", stacks)
    axes = int_per_value(node, "scan_output_axes", stacks)
    return UnrolledScan(
        states,
        [
            (parts[:: -1 if turn else 1], axis % (op.rank(parts[0]) + 1))
            for parts, turn, axis in zip(stacks, turns, axes, strict=True)
        ],
    )


def int_per_value(node: ir.Node, name: str, like: Sequence[object]) -> list[int]:
    """Return an attribute with a number for each of several values; zeros by default."""
    attribute = node.attributes.get(name)
    return [0] * len(like) if attribute is None else list(attribute.as_ints())


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


def _can_unroll(body: ir.Graph, steps: int, most_nodes: int = _MAX_UNROLLED_NODES) -> bool:
    return 0 < steps <= _MAX_STEPS and steps * len(body) <= most_nodes


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
