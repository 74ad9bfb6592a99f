"""Linear attention states, packed sequences and mixtures of experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.graph.contrib.fused_case import BATCH, LENGTH, Case, normal

HQ, HK, DK, DV = 4, 2, 4, 6


def linear(q, k, v, past=None, decay=None, beta=None, *, q_num_heads, kv_num_heads, update_rule):
    """Compute the recurrence by its definition, token by token."""
    n, t, _ = q.shape
    q, k, v = (
        x.reshape(n, t, h, -1) for x, h in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
    )
    state = np.zeros((n, kv_num_heads, DK, DV)) if past is None else past.copy()
    ys = []
    for i in range(t):
        if decay is not None:
            state = state * np.exp(decay[:, i].reshape(n, kv_num_heads, -1))[..., None]
        new = v[:, i]
        if beta is not None:
            new = beta[:, i, :, None] * (new - np.einsum("nhk,nhkv->nhv", k[:, i], state))
        state = state + k[:, i, :, :, None] * new[:, :, None]
        heads = np.arange(max(q_num_heads, kv_num_heads))
        many = state[:, heads * kv_num_heads // len(heads)]
        ys.append(np.einsum("nhk,nhkv->nhv", q[:, i][:, heads * q_num_heads // len(heads)], many))
    y = np.stack(ys, 1) / np.sqrt(DK)
    return y.reshape(n, t, -1), state


Q, K, V = (
    normal(BATCH, LENGTH, HQ * DK),
    normal(BATCH, LENGTH, HK * DK),
    normal(BATCH, LENGTH, HK * DV),
)
DECAY, BETA = -abs(normal(BATCH, LENGTH, HK)), abs(normal(BATCH, LENGTH, HK))
STATE = normal(BATCH, HK, DK, DV)


def attention(rule, past=None, decay=None, beta=None, q=Q, heads=HQ):
    form = {"q_num_heads": heads, "kv_num_heads": HK, "update_rule": rule}
    return Case("LinearAttention", [q, K, V, past, decay, beta], form, ("y", "s"), reference=linear)


def conv(x, w, b=None, past=None, *, activation="none", dilation=1, channels_last=0):
    x, past = (a.transpose(0, 2, 1) if channels_last and a is not None else a for a in (x, past))
    keep = (w.shape[-1] - 1) * dilation
    past = np.zeros((*x.shape[:2], keep), x.dtype) if past is None else past
    line = np.concatenate([past, x], 2)
    y = sum(
        w[None, :, 0, j, None] * line[:, :, j * dilation : j * dilation + x.shape[2]]
        for j in range(w.shape[-1])
    )
    y = y if b is None else y + b[None, :, None]
    y = y / (1 + np.exp(-y)) if activation == "silu" else y
    state = line[:, :, line.shape[2] - keep :]
    return tuple(a.transpose(0, 2, 1) for a in (y, state)) if channels_last else (y, state)


LINE, KERNEL = normal(BATCH, 4, LENGTH), normal(4, 1, 4)


def experts(
    x,
    router,
    w1,
    b1,
    w2,
    b2,
    w3=None,
    b3=None,
    *,
    k=1,
    activation_type="relu",
    normalize_routing_weights=0,
    swiglu_fusion=0,
    activation_alpha=1.0,
    activation_beta=0.0,
    swiglu_limit=None,
):
    """Compute the top experts of each token, one token at a time."""
    out = np.zeros_like(x)
    p = np.exp(router - router.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    for t in range(len(x)):
        best = np.argsort(-router[t])[:k]
        share = p[t, best] / (p[t, best].sum() if normalize_routing_weights else 1)
        for e, weight in zip(best, share, strict=True):
            h = w1[e] @ x[t] + b1[e]
            if activation_type == "swiglu":
                g, u = (h[0::2], h[1::2]) if swiglu_fusion == 1 else np.split(h, 2)
                g, u = np.minimum(g, swiglu_limit), np.clip(u, -swiglu_limit, swiglu_limit)
                h = g / (1 + np.exp(-activation_alpha * g)) * (u + activation_beta)
            else:
                h = np.maximum(h, 0) if activation_type == "relu" else h / (1 + np.exp(-h))
                h = h if w3 is None else h * (w3[e] @ x[t] + b3[e])
            out[t] += weight * (w2[e] @ h + b2[e])
    return out


TOKENS, ROUTER = normal(7, 8), normal(7, 4)
W1, B1, W2, B2 = normal(4, 6, 8), normal(4, 6), normal(4, 8, 6), normal(4, 8)
WIDE, WIDE_BIAS = normal(4, 12, 8), normal(4, 12)
SWIGLU = {
    "k": 2,
    "activation_type": "swiglu",
    "activation_alpha": 1.7,
    "activation_beta": 1.0,
    "swiglu_limit": 0.4,
}


def moe(*more, w1=W1, b1=B1, **form):
    return Case("MoE", [TOKENS, ROUTER, w1, b1, W2, B2, *more], form, reference=experts)


def packed(x, w, b, places, sums, bias=None, *, num_heads):
    """Compute attention of each sequence separately."""
    qkv = x @ w + b
    out = []
    for i in range(len(sums) - 1):
        part = qkv[sums[i] : sums[i + 1]]
        q, k, v = (
            t.reshape(len(t), num_heads, -1).transpose(1, 0, 2) for t in np.split(part, 3, 1)
        )
        s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        if bias is not None:
            s = s + bias[min(i, len(bias) - 1)][:, : len(part), : len(part)]
        p = np.exp(s - s.max(-1, keepdims=True))
        out.append(((p / p.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(len(part), -1))
    return np.concatenate(out)


def restored(x, places):
    y = np.zeros((places.size, x.shape[1]), x.dtype)
    y[places.reshape(-1)[: len(x)]] = x
    return y.reshape(*places.shape, -1)


def removed(x, counts):
    real = np.concatenate([i * x.shape[1] + np.arange(c) for i, c in enumerate(counts)])
    rest = np.setdiff1d(np.arange(x.shape[0] * x.shape[1]), real)
    sums = np.concatenate([[0], np.cumsum(counts)])
    places = np.concatenate([real, rest]).reshape(x.shape[:2])
    return x.reshape(-1, x.shape[2])[real], places, sums, np.array([max(counts)])


ROWS = normal(7, 8)
PLACES = np.array([[0, 5, 6, 10, 11], [12, 13, 1, 2, 3], [4, 7, 8, 9, 14]], np.int32)
SUMS = np.array([0, 1, 3, 7], np.int32)
PROJECTION, PROJECTION_BIAS = normal(8, 24), normal(24)


def packed_multi(q, k, v, b, places, sums, *, num_heads):
    eye = np.concatenate([q, k, v], 1) + b
    return packed(eye, np.eye(24, dtype=np.float32), 0, places, sums, num_heads=num_heads)


CASES = {
    "linear": attention("linear"),
    "gated": attention("gated", None, DECAY),
    "gated per key": attention("gated", STATE, -abs(normal(BATCH, LENGTH, HK * DK))),
    "delta": attention("delta", STATE, None, BETA),
    "gated delta": attention("gated_delta", STATE, DECAY, BETA),
    "more states than queries": attention(
        "gated_delta", None, DECAY, BETA, q=normal(BATCH, LENGTH, DK), heads=1
    ),
    "gate": Case(
        "LinearAttentionGate",
        [DECAY, normal(HK), -abs(normal(HK)), BETA],
        {},
        ("d", "b"),
        reference=lambda a, t, s, b: (s * np.log1p(np.exp(a + t)), 1 / (1 + np.exp(-b))),
        precision=np.float32,
    ),
    "conv": Case(
        "CausalConvWithState", [LINE, KERNEL], {}, ("y", "s"), reference=conv, precision=np.float32
    ),
    "conv, state": Case(
        "CausalConvWithState",
        [LINE, KERNEL, normal(4), normal(BATCH, 4, 6)],
        {"activation": "silu", "dilation": 2},
        ("y", "s"),
        reference=conv,
        precision=np.float32,
    ),
    "conv, channels last": Case(
        "CausalConvWithState",
        [LINE.transpose(0, 2, 1).copy(), KERNEL, normal(4), normal(BATCH, 3, 4)],
        {"channels_last": 1},
        ("y", "s"),
        reference=conv,
        precision=np.float32,
    ),
    "experts": moe(k=2),
    "experts, normalised": moe(k=2, normalize_routing_weights=1, activation_type="silu"),
    "experts, gated": moe(
        normal(4, 6, 8)[::-1].copy(), normal(4, 6)[::-1].copy(), k=3, activation_type="silu"
    ),
    "experts, swiglu": moe(w1=WIDE, b1=WIDE_BIAS, swiglu_fusion=1, **SWIGLU),
    "experts, swiglu in halves": moe(w1=WIDE, b1=WIDE_BIAS, swiglu_fusion=2, **SWIGLU),
    "packed attention": Case(
        "PackedAttention",
        [ROWS, PROJECTION, PROJECTION_BIAS, PLACES, SUMS],
        {"num_heads": 2},
        reference=packed,
    ),
    "packed attention, bias": Case(
        "PackedAttention",
        [ROWS, PROJECTION, PROJECTION_BIAS, PLACES, SUMS, normal(3, 2, 5, 5)],
        {"num_heads": 2},
        reference=packed,
    ),
    "packed multi-head": Case(
        "PackedMultiHeadAttention",
        [ROWS, ROWS + 1, ROWS[::-1].copy(), PROJECTION_BIAS, PLACES, SUMS],
        {"num_heads": 2},
        reference=packed_multi,
    ),
    "restore padding": Case("RestorePadding", [ROWS, PLACES], reference=restored),
    "remove padding": Case(
        "RemovePadding",
        [normal(3, 5, 8), np.array([1, 2, 4], np.int32)],
        {},
        ("y", "int_places", "int_sums", "int_longest"),
        reference=removed,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    CASES[name].check_forward()


# Operators with a CPU kernel; the others run on GPUs only.
KERNELS = [n for n in CASES if not n.startswith(("packed", "re"))]
KERNELS.remove("experts, swiglu in halves")
KERNELS.remove("experts, gated")


@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_kernel(name: str) -> None:
    dataclasses.replace(CASES[name], reference=None).check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()
