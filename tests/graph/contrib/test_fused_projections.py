"""Operators that fuse several quantized matmuls, and multimodal rotary embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.graph.contrib.fused_case import BATCH, LENGTH, Case, normal
from tests.graph.contrib.test_sequences_and_experts import experts

RNG = np.random.default_rng(2)
K, N, BLOCK = 64, 32, 32


def packed(n: int, k: int = K) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return packed bytes, scales and the dequantized weights."""
    numbers = RNG.integers(0, 16, (n, k // BLOCK, BLOCK)).astype(np.uint8)
    raw = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    scales = (0.01 + 0.02 * RNG.random((n, k // BLOCK))).astype(np.float32)
    return raw, scales, ((numbers.astype(np.float32) - 8) * scales[..., None]).reshape(n, k)


def rms(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


GATE, UP, Q, KEY, V = packed(N), packed(N), packed(N), packed(16), packed(16)
X, SKIP, NORM = normal(BATCH, LENGTH, K), normal(BATCH, LENGTH, K)[::-1].copy(), 1 + normal(K)


def mlp(x, skip, norm, *_, epsilon=1e-5, **__):
    total = x + skip
    h = rms(total, norm, epsilon)
    gate, up = h @ GATE[2].T, h @ UP[2].T
    return gate / (1 + np.exp(-gate)) * up, total


def qkv(x, skip, norm, *_, epsilon=1e-6, **__):
    total = x + skip
    h = rms(total, norm, epsilon)
    return h @ Q[2].T, h @ KEY[2].T, h @ V[2].T, total


ANGLES = np.outer(np.arange(16), 10000.0 ** (-np.arange(8) / 8)).astype(np.float32)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
POSITIONS = RNG.integers(0, 16, (3, BATCH, LENGTH))


def multimodal(x, positions, cos, sin, *, mrope_section, num_heads, mrope_layout=0):
    stream = np.repeat(np.arange(3), mrope_section)
    if mrope_layout:
        stream = np.zeros(8, int)
        for i in (1, 2):
            stream[i : 3 * mrope_section[i] : 3] = i
    c, s = (
        np.stack([t[positions[stream[j]], j] for j in range(8)], -1)[:, :, None] for t in (cos, sin)
    )
    heads = x.reshape(BATCH, LENGTH, num_heads, 16)
    a, b = heads[..., :8], heads[..., 8:]
    return np.concatenate([a * c - b * s, a * s + b * c], -1).reshape(x.shape)


HEADS = [normal(BATCH, 2, LENGTH, 16)[..., ::d].copy() for d in (1, -1, 1, -1)]
CASES = {
    "mlp": Case(
        "MatMulNBitsMlp",
        [X, SKIP, NORM, GATE[0], GATE[1], None, UP[0], UP[1]],
        {"K": K, "N": N, "block_size": BLOCK, "activation": "silu"},
        ("y", "s"),
        constants=(3, 4, 6, 7),
        reference=mlp,
        precision=np.float32,
    ),
    "queries, keys and values": Case(
        "MatMulNBitsQkv",
        [X, SKIP, NORM, Q[0], Q[1], None, KEY[0], KEY[1], None, V[0], V[1]],
        {"K": K, "Nq": N, "Nkv": 16, "block_size": BLOCK},
        ("q", "k", "v", "s"),
        constants=(3, 4, 6, 7, 9, 10),
        reference=qkv,
        precision=np.float32,
    ),
    "three positions": Case(
        "MRotaryEmbedding",
        [normal(BATCH, LENGTH, 32), POSITIONS, COS, SIN],
        {"mrope_section": [4, 2, 2], "num_heads": 2},
        reference=multimodal,
        fixed=(2, 3),
    ),
    "three positions in turn": Case(
        "MRotaryEmbedding",
        [normal(BATCH, LENGTH, 32), POSITIONS, COS, SIN],
        {"mrope_section": [4, 2, 2], "num_heads": 2, "mrope_layout": 1},
        reference=multimodal,
        fixed=(2, 3),
    ),
    "angles given": Case(
        "GemmaRotaryEmbedding",
        [normal(BATCH, LENGTH, 16), *HEADS],
        {},
        ("q", "k"),
        reference=lambda e, q, qr, k, kr: tuple(
            a * np.cos(e)[:, None] + b * np.sin(e)[:, None] for a, b in ((q, qr), (k, kr))
        ),
    ),
    "one offset, part of a head": Case(
        "RotaryEmbedding",
        [normal(BATCH, LENGTH, 48), np.array([2]), COS[:, :4].copy(), SIN[:, :4].copy()],
        {"num_heads": 3, "rotary_embedding_dim": 8},
        fixed=(2, 3),
    ),
    "one offset, neighbours": Case(
        "RotaryEmbedding",
        [normal(BATCH, LENGTH, 48), np.array([2]), COS, SIN],
        {"interleaved": 1, "num_heads": 3},
        fixed=(2, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel_or_the_definition(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", ["three positions", "three positions in turn"])
def test_equals_the_kernel_too(name: str) -> None:
    dataclasses.replace(CASES[name], reference=None).check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def expert_weights(experts_: int, n: int, k: int, bits: int, block: int, points: bool):
    """Return packed bytes, scales, zero points and the dequantized weights."""
    numbers = RNG.integers(0, 1 << bits, (experts_, n, k)).astype(np.uint8)
    raw = numbers if bits == 8 else numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    blocks = k // block if block else 1
    shape = (experts_, n, blocks) if block else (experts_, n)
    scales = ((0.5 + RNG.random(shape)) / (1 << bits)).astype(np.float32)
    zeros = RNG.integers(0, 1 << bits, shape).astype(np.uint8)
    narrow = zeros if bits == 8 else zeros[..., 0::2] | (zeros[..., 1::2] << 4)
    middle = zeros if points else np.full(shape, 1 << (bits - 1))
    wide = (
        numbers.reshape(experts_, n, blocks, -1)
        - middle.reshape(experts_, n, blocks, 1).astype(np.float32)
    ) * scales.reshape(experts_, n, blocks, 1)
    return raw, scales, narrow if points else None, wide.reshape(experts_, n, k).astype(np.float32)


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_experts_equal_dequantized_ones(bits: int, block: int, points: bool) -> None:
    hidden, inner, count = 32, 32, 4
    w1 = expert_weights(count, inner, hidden, bits, block, points)
    w2 = expert_weights(count, hidden, inner, bits, block, points)
    b1, b2 = normal(count, inner), normal(count, hidden)
    tokens, router = normal(7, hidden), normal(7, count)
    form = {"k": 2, "activation_type": "silu", "expert_weight_bits": bits}
    form |= {"block_size": block} if block else {}
    inputs = [tokens, router, w1[0], w1[1], b1, w2[0], w2[1], b2, *[None] * 3, w1[2], w2[2]]

    def reference(*_, **__):
        return experts(
            tokens,
            router,
            w1[3],
            b1,
            w2[3],
            b2,
            k=2,
            activation_type="silu",
            normalize_routing_weights=1,
        )

    case = Case(
        "QMoE",
        inputs,
        form,
        constants=(2, 3, 5, 6, 11, 12),
        reference=reference,
        precision=np.float32,
        fixed=(3, 6),
    )
    case.check_forward()
    case.check_gradient()
    if bits == 4 or not block:  # 8 bits in blocks: the kernel rounds its input
        dataclasses.replace(case, reference=None).check_forward()
