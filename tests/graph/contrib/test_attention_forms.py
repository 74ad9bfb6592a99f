"""Attention and MultiHeadAttention: all mask shapes, caches, bias, packed projections."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from tests.graph.contrib.fused_case import BATCH, LENGTH, PAST, Case, normal

N, H = 2, 16
W = N * H
X, WEIGHT, BIAS = normal(BATCH, LENGTH, W), normal(W, 3 * W), normal(3 * W)
LENGTHS = np.array([LENGTH, LENGTH - 2], np.int32)
RAW = (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int32)
LEFT = np.array([LENGTH, LENGTH - 1, 1, 2], np.int32)  # ends, then beginnings
SUMS = np.array([*LENGTHS, 0, 5, 8, 0, 5, 8], np.int32)
CUBE = (np.arange(LENGTH)[None, :, None] >= np.arange(LENGTH)).astype(np.int32) * RAW[:, None]
LARGE = np.tril(np.ones((BATCH, 1, 9, 9), np.int32))
CACHE = normal(2, BATCH, N, PAST, H)
LONG = np.concatenate([np.ones((BATCH, PAST), np.int32), RAW], 1)


def attention(mask=None, past=None, bias=None, outputs=("y",), **attributes):
    return Case(
        "Attention", [X, WEIGHT, BIAS, mask, past, bias], {"num_heads": N, **attributes}, outputs
    )


ATTENTION = {
    "no mask": attention(),
    "raw": attention(RAW),
    "lengths": attention(LENGTHS),
    "ends and beginnings": attention(LEFT),
    "cube": attention(CUBE),
    "causal and padded": attention(RAW, unidirectional=1),
    "causal lengths": attention(LENGTHS, unidirectional=1),
    "past": attention(LONG, CACHE, outputs=("y", "present"), unidirectional=1),
    "past both ways": attention(None, CACHE, outputs=("y", "present")),
    "bias": attention(RAW, None, normal(1, N, LENGTH, LENGTH)),
    "filter": attention(RAW, mask_filter_value=-3.0),
    "narrow values": Case(
        "Attention",
        [X, normal(W, 2 * W + N * 8), normal(2 * W + N * 8)],
        {"num_heads": N, "qkv_hidden_sizes": [W, W, N * 8]},
    ),
}
Q, K, V = X, normal(BATCH, LENGTH + 1, W), normal(BATCH, LENGTH + 1, N * 8)
KEYS = np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32)
OLD_K, OLD_V = normal(BATCH, N, PAST, H), normal(BATCH, N, PAST, H)[..., ::-1].copy()


def multi(*inputs, outputs=("y",), **attributes):
    return Case("MultiHeadAttention", list(inputs), {"num_heads": N, **attributes}, outputs)


MULTI = {
    "cross": multi(Q, K, V),
    "cross bias": multi(Q, K, V, normal(2 * W + N * 8)),
    "key mask": multi(Q, K, V, None, KEYS),
    "key lengths": multi(Q, K, V, None, np.array([6, 4], np.int32)),
    "cube mask": multi(Q, Q, Q, None, CUBE),
    "heads apart": multi(Q, normal(BATCH, N, 6, H), normal(BATCH, N, 6, H)[::-1].copy()),
    "bias added": multi(Q, K, V, None, None, normal(BATCH, N, LENGTH, LENGTH + 1)),
    "causal": multi(Q, Q, Q, unidirectional=1),
    "scores": multi(Q, K, V, outputs=("y", "", "", "qk")),
    "past": multi(Q, Q, Q, None, None, None, OLD_K, OLD_V, outputs=("y", "k", "v")),
    "past causal": multi(
        Q, Q, Q, None, None, None, OLD_K, OLD_V, outputs=("y", "k", "v"), unidirectional=1
    ),
    "past mask": multi(Q, Q, Q, None, LONG, None, OLD_K, OLD_V, outputs=("y", "k", "v")),
}


def packed_reference(qkv, *rest, num_heads):
    """Compute attention of packed [batch, length, heads, 3, size] in NumPy."""
    q, k, v = (qkv[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    return y.transpose(0, 2, 1, 3).reshape(qkv.shape[0], qkv.shape[1], -1)


MULTI["packed"] = Case(
    "MultiHeadAttention",
    [normal(BATCH, LENGTH, N, 3, H)],
    {"num_heads": N},
    reference=packed_reference,
)


def step_reference(q, k, v, mask=None, _bias=None, past_k=None, past_v=None, *, num_heads):
    """Compute one token after a cache; the CPU kernel crashes unless the cache is a buffer."""

    def heads(t):
        return t.reshape(BATCH, 1, num_heads, H).transpose(0, 2, 1, 3)

    present = ()
    if past_k is not None:
        k, v = np.concatenate([past_k, heads(k)], 2), np.concatenate([past_v, heads(v)], 2)
        present = (k, v)
    s = heads(q) @ k.transpose(0, 1, 3, 2) / np.sqrt(H)
    s = s if mask is None else s + np.where(mask, 0, -10000.0)[:, None, None]
    p = np.exp(s - s.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    return y.transpose(0, 2, 1, 3).reshape(BATCH, 1, -1), *present


STEP = normal(BATCH, 1, W)
DECODER = {
    "step": Case(
        "DecoderMaskedMultiHeadAttention",
        [STEP, STEP + 1, STEP - 1, None, None, OLD_K, OLD_V],
        {"num_heads": N},
        ("y", "k", "v"),
        reference=step_reference,
    ),
    "cross": Case(
        "DecoderMaskedMultiHeadAttention",
        [STEP, OLD_K, OLD_V, np.array([[1, 1, 1], [1, 1, 0]], np.int32)],
        {"num_heads": N},
        reference=step_reference,
    ),
}
CASES = {
    **{f"attention, {n}": c for n, c in ATTENTION.items()},
    **{f"multi-head, {n}": c for n, c in MULTI.items()},
    **{f"decoder, {n}": c for n, c in DECODER.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def _kernel(case: Case) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(case.model().SerializeToString())
    return session.run(None, case.feeds())


def test_missing_projection_bias_is_zero() -> None:
    """The CPU kernel crashes without a bias."""
    zeros = Case("Attention", [X, WEIGHT, 0 * BIAS], {"num_heads": N})
    without = Case(
        "Attention", [X, WEIGHT], {"num_heads": N}, reference=lambda *_, **__: _kernel(zeros)[0]
    )
    without.check_forward()
    without.check_gradient()


def test_mask_of_rank_4_is_sliced_to_the_sequence() -> None:
    """No CPU kernel supports rank 4; the part that is used is passed as rank 3."""
    cut, large = attention(np.ascontiguousarray(LARGE[:, 0, :LENGTH, :LENGTH])), attention(LARGE)
    Case(
        large.op, large.inputs, large.attributes, reference=lambda *_, **__: _kernel(cut)[0]
    ).check_forward()


def test_lengths_with_cumulative_sums() -> None:
    """No CPU kernel supports this mask; its first values are the plain lengths."""
    plain, sums = attention(LENGTHS), attention(SUMS)
    Case(
        sums.op, sums.inputs, sums.attributes, reference=lambda *_, **__: _kernel(plain)[0]
    ).check_forward()
