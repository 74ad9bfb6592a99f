"""RNN, GRU and LSTM as a Scan over time.

The input projections leave the loop as one matmul for all steps; each step computes the recurrent
projection. Shapes below: T steps, B sequences, I inputs, H hidden units, D directions (1 or 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import PrepareError, expected_one_of
from onnxtrain.expand.control_flow import RECURRENT
from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

OptionalValue = ir.Value | None


Cell = Callable[..., Sequence[ir.Value]]


_REVERSED = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
"""For each direction of a node, whether time runs backwards."""


@expansion("LSTM", "GRU", "RNN", when=LOWERING)
def time_first(op, x, w, r, *rest, node, layout):
    """Transpose ``layout=1`` to time first: before opset 14 there is no other layout."""
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


@expansion("RNN", when=TRAINING)
@expansion("RNN", when=LOWERING)
def rnn(
    op,
    x,
    w,
    r,
    b=None,
    lens=None,
    h0=None,
    *,
    activations=None,
    activation_alpha=None,
    activation_beta=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    layout=0,
    node,
):
    """``h' = f(x W^T + h R^T + b)``."""
    n = _directions(direction)
    acts = _activations(op, activations, ["Tanh"] * n, activation_alpha, activation_beta, n, node)

    def cell(body, gates, states, weights, d):
        (f,) = acts[d]
        return [f(body, _clip(body, body.Add(gates, body.MatMul(states[0], weights["r"])), clip))]

    def prepare_weights(d):
        return {"r": op.Transpose(_part(op, r, d), perm=[1, 0])}

    ys, (hs,) = _run(
        op,
        x,
        w,
        b,
        lens,
        [h0],
        cell,
        prepare_weights,
        gates=1,
        direction=direction,
        layout=layout,
        hidden=_hidden(r, hidden_size),
        node=node,
    )
    return ys, hs


@expansion("GRU", when=TRAINING)
@expansion("GRU", when=LOWERING)
def gru(
    op,
    x,
    w,
    r,
    b=None,
    lens=None,
    h0=None,
    *,
    activations=None,
    activation_alpha=None,
    activation_beta=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    layout=0,
    linear_before_reset=0,
    node,
):
    """Gates in the order z, r, h; ``h' = (1 - z) * n + z * h = n + z * (h - n)``.

    With ``linear_before_reset`` the recurrent bias of the candidate is inside the reset gate.
    """
    n = _directions(direction)
    default = ["Sigmoid", "Tanh"] * n
    acts = _activations(op, activations, default, activation_alpha, activation_beta, n, node)
    hidden = _hidden(r, hidden_size)

    def prepare_weights(d):
        rd = op.Transpose(_part(op, r, d), perm=[1, 0])  # [H, 3H]
        parts = {
            "zr": op.Slice(rd, [0], [2 * hidden], [1]),
            "n": op.Slice(rd, [2 * hidden], [3 * hidden], [1]),
        }
        if linear_before_reset:
            parts["all"] = rd
            if b is not None:
                parts["rb"] = op.Slice(_part(op, b, d), [5 * hidden], [6 * hidden], [0])
        return parts

    def cell(body, gates, states, weights, d):
        f, g = acts[d]
        (h,) = states
        sizes = body.const([2 * hidden, hidden])
        x_zr, x_n = body.Split(gates, sizes, axis=-1, _outputs=2)
        h_n: ir.Value | None = None
        if linear_before_reset:
            product = body.MatMul(h, weights["all"])
            h_zr, h_n = body.Split(product, sizes, axis=-1, _outputs=2)
            if "rb" in weights:
                h_n = body.Add(h_n, weights["rb"])
        else:
            h_zr = body.MatMul(h, weights["zr"])
        zr = f(body, _clip(body, body.Add(x_zr, h_zr), clip))
        z, reset = body.Split(zr, axis=-1, num_outputs=2, _outputs=2)
        if h_n is not None:
            inner = body.Mul(reset, h_n)
        else:
            inner = body.MatMul(body.Mul(reset, h), weights["n"])
        new = g(body, _clip(body, body.Add(x_n, inner), clip))
        return [body.Add(new, body.Mul(z, body.Sub(h, new)))]

    ys, (hs,) = _run(
        op,
        x,
        w,
        b,
        lens,
        [h0],
        cell,
        prepare_weights,
        gates=3,
        direction=direction,
        layout=layout,
        hidden=hidden,
        node=node,
        late_bias=bool(linear_before_reset),
    )
    return ys, hs


@expansion("LSTM", when=TRAINING)
@expansion("LSTM", when=LOWERING)
def lstm(
    op,
    x,
    w,
    r,
    b=None,
    lens=None,
    h0=None,
    c0=None,
    p=None,
    *,
    activations=None,
    activation_alpha=None,
    activation_beta=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    input_forget=0,
    layout=0,
    node,
):
    """Gates in the order i, o, f, c, with peepholes ``p`` in the order i, o, f."""
    n = _directions(direction)
    default = ["Sigmoid", "Tanh", "Tanh"] * n
    acts = _activations(op, activations, default, activation_alpha, activation_beta, n, node)
    hidden = _hidden(r, hidden_size)

    def prepare_weights(d):
        parts = {"r": op.Transpose(_part(op, r, d), perm=[1, 0])}
        if p is not None:
            peep = _part(op, p, d)
            for i, gate in enumerate("iof"):
                parts[gate] = op.Slice(peep, [i * hidden], [(i + 1) * hidden], [0])
        return parts

    def cell(body, gates, states, weights, d):
        f, g, out = acts[d]
        h, c = states
        total = body.Add(gates, body.MatMul(h, weights["r"]))
        if p is None and not input_forget:
            # One activation for three gates: a step is many small operators.
            iof, gc = body.Split(total, body.const([3 * hidden, hidden]), axis=-1, _outputs=2)
            iof = f(body, _clip(body, iof, clip))
            i, o, forget = body.Split(iof, axis=-1, num_outputs=3, _outputs=3)
            candidate = g(body, _clip(body, gc, clip))
            new_c = body.Add(body.Mul(forget, c), body.Mul(i, candidate))
            return [body.Mul(o, out(body, new_c)), new_c]
        gi, go, gf, gc = body.Split(total, axis=-1, num_outputs=4, _outputs=4)
        if p is not None:
            gi = body.Add(gi, body.Mul(weights["i"], c))
            gf = body.Add(gf, body.Mul(weights["f"], c))
        i = f(body, _clip(body, gi, clip))
        forget = body.Sub(1.0, i) if input_forget else f(body, _clip(body, gf, clip))
        new_c = body.Add(body.Mul(forget, c), body.Mul(i, g(body, _clip(body, gc, clip))))
        if p is not None:
            go = body.Add(go, body.Mul(weights["o"], new_c))
        o = f(body, _clip(body, go, clip))
        return [body.Mul(o, out(body, new_c)), new_c]

    ys, (hs, cs) = _run(
        op,
        x,
        w,
        b,
        lens,
        [h0, c0],
        cell,
        prepare_weights,
        gates=4,
        direction=direction,
        layout=layout,
        hidden=hidden,
        node=node,
    )
    return ys, hs, cs


def _run(
    op: OpBuilder,
    x: ir.Value,
    w: ir.Value,
    b: OptionalValue,
    lens: OptionalValue,
    initial: list[OptionalValue],
    cell: Cell,
    prepare_weights: Callable[[int], dict[str, ir.Value]],
    *,
    gates: int,
    direction: str,
    layout: int,
    hidden: int,
    node: ir.Node,
    late_bias: bool = False,
) -> tuple[ir.Value, list[ir.Value]]:
    """Run every direction; return Y and the final states in the layout of the node."""
    if layout:
        x = op.Transpose(x, perm=[1, 0, 2])  # [B, T, I] -> [T, B, I]
        initial = [None if s is None else op.Transpose(s, perm=[1, 0, 2]) for s in initial]
    turns = _REVERSED.get(direction)
    if turns is None:
        raise PrepareError(
            f"node {node.name!r}: unknown direction {direction!r} "
            f"{expected_one_of(direction, _REVERSED)}"
        )
    ys, finals = [], []
    for d, turn in enumerate(turns):
        steps = x
        if turn and lens is not None:  # reverse each sequence within its own length
            steps = op.ReverseSequence(
                x, op.cast(lens, ir.DataType.INT64), batch_axis=1, time_axis=0
            )
        projected = op.MatMul(steps, op.Transpose(_part(op, w, d), perm=[1, 0]))
        bias = _bias(op, b, d, gates, hidden, late_bias)
        if bias is not None:
            projected = op.Add(projected, bias)
        states = [_initial(op, s, d, x, hidden) for s in initial]
        y, last = _scan(
            op, projected, states, lens, cell, prepare_weights(d), d, turn and lens is None
        )
        if turn and lens is not None:
            y = op.ReverseSequence(y, op.cast(lens, ir.DataType.INT64), batch_axis=1, time_axis=0)
        ys.append(op.Unsqueeze(y, [1]))  # [T, 1, B, H]
        finals.append([op.Unsqueeze(s, [0]) for s in last])
    y = ys[0] if len(ys) == 1 else op.Concat(*ys, axis=1)
    ends = [
        parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
        for parts in zip(*finals, strict=True)
    ]
    if layout:
        y = op.Transpose(y, perm=[2, 0, 1, 3])  # [T, D, B, H] -> [B, T, D, H]
        ends = [op.Transpose(e, perm=[1, 0, 2]) for e in ends]
    return y, ends


def _scan(
    op: OpBuilder,
    projected: ir.Value,
    states: list[ir.Value],
    lens: OptionalValue,
    cell: Cell,
    weights: dict[str, ir.Value],
    d: int,
    backwards: bool,
) -> tuple[ir.Value, list[ir.Value]]:
    dims = op.dims(projected)
    scans = [projected]
    if lens is not None:
        count = op.size(projected, 0)
        limit = op.Squeeze(count, [0]) if isinstance(count, ir.Value) else op.const(count)
        number = op.cast(op.Range(op.const(0), limit, op.const(1)), lens.dtype)
        # [T, B, 1]: is this step still inside the sequence?
        alive = op.Less(op.Unsqueeze(number, [1, 2]), op.Unsqueeze(lens, [0, 2]))
        scans.append(alive)
    body = op.body([*states, *scans])
    inner = list(body.graph.inputs)
    for value, source in zip(inner[len(states) :], scans, strict=True):
        S.set_dims(value, S.dims_of(source)[1:])  # pyright: ignore[reportOptionalSubscript]
    now = inner[: len(states)]
    new = list(cell(body, inner[len(states)], now, weights, d))
    y = new[0]
    if lens is not None:
        flag = inner[-1]
        y = body.Where(flag, new[0], 0.0)
        new = [body.Where(flag, a, b) for a, b in zip(new, now, strict=True)]
    for value, state in zip(new, states, strict=True):
        value.shape = state.shape
    body.graph.outputs.extend([*new, body.Identity(y)])
    turn = [1] if backwards else [0]
    *last, ys = op.Scan(
        *states,
        *scans,
        body=body.graph,
        num_scan_inputs=len(scans),
        scan_input_directions=turn * len(scans),
        scan_output_directions=turn,
        _outputs=len(states) + 1,
    )
    loop = ys.producer()
    assert loop is not None
    loop.meta[RECURRENT] = True
    S.set_dims(ys, [dims[0], *(S.dims_of(states[0]) or ())])
    return ys, last


def _part(op: OpBuilder, x: ir.Value, d: int) -> ir.Value:
    """Return one direction of a stacked tensor."""
    return op.Gather(x, op.const(d), axis=0)


def _bias(
    op: OpBuilder, b: OptionalValue, d: int, gates: int, hidden: int, late: bool
) -> OptionalValue:
    """Return the input plus the recurrent bias; ``late`` omits the candidate's recurrent bias."""
    if b is None:
        return None
    both = _part(op, b, d)
    size = gates * hidden
    left, right = op.Slice(both, [0], [size], [0]), op.Slice(both, [size], [2 * size], [0])
    if late:
        other_gates = op.Slice(right, [0], [2 * hidden], [0])
        right = op.Concat(other_gates, op.full([hidden], 0.0, b.dtype), axis=0)  # pyright: ignore[reportArgumentType]
    return op.Add(left, right)


def _initial(op: OpBuilder, s: OptionalValue, d: int, x: ir.Value, hidden: int) -> ir.Value:
    if s is not None:
        return _part(op, s, d)
    assert x.dtype is not None
    return op.full([op.size(x, 1), hidden], 0.0, x.dtype)


def _hidden(r: ir.Value, hidden_size: int | None) -> int:
    dims = S.dims_of(r)
    if dims is not None and isinstance(dims[-1], int):
        return dims[-1]
    if hidden_size is None:
        raise PrepareError(f"the number of hidden units is unknown: {S.describe_value(r)}")
    return hidden_size


def _directions(direction: str) -> int:
    return 2 if direction == "bidirectional" else 1


def _clip(op: OpBuilder, x: ir.Value, clip: float | None) -> ir.Value:
    return op.Clip(x, -clip, clip) if clip else x


_DEFAULTS = {
    "affine": (1.0, 0.0),
    "elu": (1.0, None),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, None),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, None),
}


def _activations(
    op: OpBuilder,
    names: list[Any] | None,
    default: list[str],
    alphas: list[float] | None,
    betas: list[float] | None,
    n: int,
    node: ir.Node,
) -> list[list[Callable[[OpBuilder, ir.Value], ir.Value]]]:
    """Return the activation functions of each direction.

    Alphas and betas are listed for those functions that take one, in order.
    """
    alphas, betas = list(alphas or []), list(betas or [])
    functions = []
    # The schema's default for RNN lists two functions whatever the number of directions.
    chosen = names if names and "activations" in node.attributes else default
    for name in chosen:
        key = (name.decode() if isinstance(name, bytes) else name).lower()
        a, b = _DEFAULTS.get(key, (None, None))
        if a is not None and alphas:
            a = alphas.pop(0)
        if b is not None and betas:
            b = betas.pop(0)
        function = _ACTIVATIONS.get(key)
        if function is None:
            raise PrepareError(
                f"node {node.name!r}: {node.op_type} with activation {name!r} is unknown"
            )
        functions.append(lambda o, v, f=function, a=a, b=b: f(o, v, a, b))
    each = len(functions) // n
    return [functions[d * each : (d + 1) * each] for d in range(n)]


_ACTIVATIONS: dict[str, Callable[[OpBuilder, ir.Value, Any, Any], ir.Value]] = {
    "affine": lambda o, v, a, b: o.Add(o.Mul(v, a), b),
    "elu": lambda o, v, a, b: o.Elu(v, alpha=a),
    "hardsigmoid": lambda o, v, a, b: o.HardSigmoid(v, alpha=a, beta=b),
    "leakyrelu": lambda o, v, a, b: o.LeakyRelu(v, alpha=a),
    "relu": lambda o, v, a, b: o.Relu(v),
    "scaledtanh": lambda o, v, a, b: o.Mul(o.Tanh(o.Mul(v, b)), a),
    "sigmoid": lambda o, v, a, b: o.Sigmoid(v),
    "softplus": lambda o, v, a, b: o.Softplus(v),
    "softsign": lambda o, v, a, b: o.Softsign(v),
    "tanh": lambda o, v, a, b: o.Tanh(v),
    "thresholdedrelu": lambda o, v, a, b: o.ThresholdedRelu(v, alpha=a),
}
