"""Recurrences: as Scan, and loops of known length written out.

Control flow as data flow.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.expand import fourier, recurrent
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.lowerings import inline, lower

_MOST = 512  # nodes of a loop that is written out, times its length
_STEPS = 256


@lower("LSTM", "GRU", "RNN")
def time_first(op, x, w, r, *rest, node, layout):
    """Before opset 14 time is the first axis."""
    if not layout:
        return None
    attributes = {n: S.python_value(a) for n, a in node.attributes.items() if n != "layout"}
    swapped = [
        v if v is None or i not in (2, 3) else op.Transpose(v, perm=[1, 0, 2])
        for i, v in enumerate(rest)
    ]
    outputs = op.emit(
        node.op_type,
        op.Transpose(x, perm=[1, 0, 2]),
        w,
        r,
        *swapped,
        _outputs=3 if node.op_type == "LSTM" else 2,
        **attributes,
    )
    y, *ends = outputs
    return [op.Transpose(y, perm=[2, 0, 1, 3]), *(op.Transpose(e, perm=[1, 0, 2]) for e in ends)]


lower("LSTM")(recurrent.lstm)
lower("GRU")(recurrent.gru)
lower("RNN")(recurrent.rnn)
lower("STFT")(fourier.stft)


@lower("Scan")
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
    """Every step written out."""
    body = node.attributes["body"].as_graph()
    count = len(inputs) - num_scan_inputs
    states, scans = list(inputs[:count]), list(inputs[count:])
    axes = [a % op.rank(v) for a, v in zip(scan_input_axes or [0] * len(scans), scans, strict=True)]
    steps = op.dims(scans[0])[axes[0]] if scans else None
    if not isinstance(steps, int) or not _truncate_body(body, steps):
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


@lower("Loop")
def loop(op, trips, condition=None, *carried, node):
    """Every step written out, where their number is known: by its count, or step by step."""
    body = node.attributes["body"].as_graph()
    count = None if trips is None else op.constant(trips)
    start = np.asarray(True) if condition is None else op.constant(condition)
    if start is None or (trips is not None and count is None):
        return None
    most = _STEPS if count is None else int(count.reshape(()))
    known = count is not None and _continues(op, body)
    if not _truncate_body(body, most if known else 1):
        return None
    going: np.ndarray | None = start
    states = list(carried)
    ys: list[list[ir.Value]] = [[] for _ in body.outputs[1 + len(states) :]]
    for t in range(most):
        if going is None:
            return None  # whether the loop goes on depends on the data
        if not bool(going):
            break
        flag, *outputs = inline(op, body, [op.const(t), op.const(True), *states])
        states = outputs[: len(states)]
        for collected, y in zip(ys, outputs[len(states) :], strict=True):
            collected.append(op.Unsqueeze(y, [0]))
        going = start if known else op.constant(flag)
    else:
        if count is None:
            return None  # too long to be written out
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


def _truncate_body(body: ir.Graph, steps: int | str | None) -> bool:
    return isinstance(steps, int) and 0 < steps <= _STEPS and steps * len(body) <= _MOST * 64


@lower("If")
def run_both_branches(op, condition, *, node):
    """Both branches, and one of each pair of results.

    Only for results of one shape. What would fail in the branch that is not taken fails here too.
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
