"""Linear attention over a recurrent state, and the causal convolution in front of it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.expand.attention_parts import SLICE_END
from onnxtrain.expand.expansions import TRAINING, expansion, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, minus

_RULES = ("linear", "gated", "delta", "gated_delta")


@expansion("com.microsoft::LinearAttention", when=TRAINING)
def linear_attention(
    op,
    query,
    key,
    value,
    past_state=None,
    decay: Any = None,
    beta: Any = None,
    *,
    q_num_heads,
    kv_num_heads,
    scale=0.0,
    update_rule="gated_delta",
    chunk_size=64,
    state_window=0,
    node,
):
    """``S = e^g S + b k (v - e^g S^T k)^T`` and ``o = scale q^T S``, step by step.

    Rules without a gate have no ``g``; rules without delta have neither ``b`` nor the subtraction.
    """
    if update_rule not in _RULES or state_window:
        raise_unsupported(node, "unknown update_rule, or a state_window")
    heads, groups = kv_num_heads, q_num_heads
    q, k, v = (_steps(op, x, n) for x, n in ((query, groups), (key, heads), (value, heads)))
    size = op.dims(k)[-1]
    if not isinstance(size, int) or not isinstance(op.dims(v)[-1], int):
        raise_unsupported(node, "the head size must be static")
    q = op.Mul(q, scale or size**-0.5)
    scans = [q, k, v]
    if "gated" in update_rule:
        per_key = op.dims(decay)[-1] != heads or size == 1
        scans.append(op.Exp(_steps(op, decay, heads, size if per_key else 1)))
    if "delta" in update_rule:
        scans.append(_steps(op, beta, heads if op.dims(beta)[-1] == heads else 1, 1))
    state = past_state
    if state is None:
        state = op.full([op.size(query, 0), heads, size, op.dims(v)[-1]], 0.0, query.dtype)
        S.set_dims(state, [op.dims(query)[0], heads, size, op.dims(v)[-1]])
    state_dtype = state.dtype
    state = op.cast(state, query.dtype)
    last, ys = _scan_step(op, state, scans, update_rule, groups, heads)
    y = op.Reshape(op.Transpose(ys, perm=[1, 0, 2, 3]), [0, 0, -1])
    S.set_dims(y, [*op.dims(query)[:2], max(groups, heads) * op.dims(v)[-1]])
    return y, op.cast(last, state_dtype)


def _steps(op: OpBuilder, x: ir.Value, heads: int, size: int | None = None) -> ir.Value:
    """Return [B, T, H * D] as [T, B, H, D]."""
    width = op.dims(x)[-1]
    last = size if size is not None else width // heads if isinstance(width, int) else -1
    return op.Transpose(op.Reshape(x, [0, 0, heads, last]), perm=[1, 0, 2, 3])


def _scan_step(
    op: OpBuilder, state: ir.Value, scans: list[ir.Value], rule: str, groups: int, heads: int
) -> tuple[ir.Value, ir.Value]:
    body = op.body([state, *scans])
    inner = list(body.graph.inputs)
    for value, source in zip(inner[1:], scans, strict=True):
        S.set_dims(value, op.dims(source)[1:])
    now, q, k, v, *rest = inner
    if "gated" in rule:
        now = body.Mul(now, body.Unsqueeze(rest.pop(0), [-1]))
    rows = body.Unsqueeze(v, [2])  # [B, H, 1, dv]
    if "delta" in rule:
        seen = body.MatMul(body.Unsqueeze(k, [2]), now)
        rows = body.Mul(body.Sub(rows, seen), body.Unsqueeze(rest.pop(0), [2]))
    new = body.Add(now, body.MatMul(body.Unsqueeze(k, [3]), rows))
    new.shape = state.shape
    y = _read_state(body, q, new, groups, heads)
    body.graph.outputs.extend([new, y])
    last, ys = op.Scan(state, *scans, body=body.graph, num_scan_inputs=len(scans), _outputs=2)
    last.shape = state.shape
    S.set_dims(ys, [op.dims(scans[0])[0], *(S.dims_of(y) or ())])
    return last, ys


def _read_state(op: OpBuilder, q: ir.Value, state: ir.Value, groups: int, heads: int) -> ir.Value:
    """Return ``q^T S`` per head, [B, max(groups, heads), dv]; several heads may share one."""
    size, out = op.dims(state)[2], op.dims(state)[3]
    if groups >= heads:
        y = op.MatMul(op.Reshape(q, [0, heads, groups // heads, size]), state)
    else:
        spread = op.Reshape(state, [0, groups, heads // groups, size, out])
        y = op.MatMul(op.Reshape(q, [0, groups, 1, 1, size]), spread)
    y = op.Reshape(y, [0, max(groups, heads), out])
    S.set_dims(y, [op.dims(q)[0], max(groups, heads), out])
    return y


@expansion("com.microsoft::LinearAttentionGate", when=TRAINING)
def linear_attention_gate(op, a, dt_bias, decay_scale, b=None):
    """``decay_scale * softplus(a + dt_bias)`` and ``sigmoid(b)``."""
    shifted = op.Add(op.cast(a, dt_bias.dtype), dt_bias)
    decay = op.cast(op.Mul(decay_scale, op.Softplus(shifted)), a.dtype)
    decay.shape = a.shape
    return decay, None if b is None else op.Sigmoid(b)


@expansion("com.microsoft::CausalConvWithState", when=TRAINING)
def causal_conv_with_state(
    op,
    x,
    weight,
    bias=None,
    past_state=None,
    *,
    ndim=1,
    activation="none",
    channels_last=0,
    dilation=1,
    state_window=0,
    node,
):
    """A depthwise causal convolution; the state holds the last inputs."""
    if ndim != 1 or state_window or activation not in ("none", "silu", "swish"):
        raise_unsupported(
            node, "only ndim=1, no state_window, and activation none or silu are supported"
        )
    width = op.dims(weight)[-1]
    if not isinstance(width, int):
        raise_unsupported(node, "the kernel size must be static")
    if channels_last:
        x = op.Transpose(x, perm=[0, 2, 1])
        past_state = None if past_state is None else op.Transpose(past_state, perm=[0, 2, 1])
    length = (width - 1) * dilation
    if past_state is None:
        line = op.Pad(x, [0, 0, length, 0, 0, 0])
    else:
        line = op.Concat(past_state, x, axis=2)
    y = op.Conv(line, weight, bias, group=op.dims(weight)[0], dilations=[dilation])
    y.shape = x.shape
    if activation != "none":
        y = op.Mul(y, op.Sigmoid(y))
    total = op.size(line, 2)
    start = op.vector([minus(op, total, length)])
    state = op.Slice(line, start, [SLICE_END], [2])
    S.set_dims(state, [*op.dims(x)[:2], length])
    if channels_last:
        y, state = op.Transpose(y, perm=[0, 2, 1]), op.Transpose(state, perm=[0, 2, 1])
    return y, state
