"""Fused operators other than attention: normalizations, layouts, transforms, indices."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.graph.contrib.fused_case import BATCH, LENGTH, Case, normal

X = normal(BATCH, LENGTH, 8)
IMAGE = normal(BATCH, 6, 5, 4)  # channels last
F32 = np.float32


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, epsilon=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def groups(x, gamma, beta, *, groups, activation, channels_last=1, epsilon=1e-5):
    x = x if channels_last else np.moveaxis(x, 1, -1)
    n, h, w, c = x.shape
    parts = x.reshape(n, h, w, groups, c // groups)
    mean, var = (f(parts, (1, 2, 4), keepdims=True) for f in (np.mean, np.var))
    y = ((parts - mean) / np.sqrt(var + epsilon)).reshape(x.shape) * gamma + beta
    y = y * sigmoid(y) if activation else y
    return y if channels_last else np.moveaxis(y, -1, 1)


def skipped(x, gamma, beta, skip, bias=None, **form):
    skip = skip[:, None, None] if skip.ndim == 2 else skip
    total = x + skip + (0 if bias is None else bias)
    return groups(total, gamma, beta, **form), total


def softmax(x, axes=-1):
    e = np.exp(x - x.max(axes, keepdims=True))
    return e / e.sum(axes, keepdims=True)


def branchwise(x, scale=None, *, num_branches=0, epsilon=1e-5):
    y = rms(x.reshape(*x.shape[:-1], num_branches, -1), epsilon)
    weight = 1 if scale is None else scale.reshape(-1, y.shape[-1])
    return (y * weight).reshape(x.shape)


def gated_norm(x, scale, gate, *, activation="silu", epsilon=1e-5):
    y = (rms(x.reshape(*x.shape[:-1], -1, len(scale)), epsilon) * scale).reshape(x.shape)
    return y * sigmoid(gate) * (gate if activation == "silu" else 1)


def pre_mix(x, mix, *, num_branches=0, reduction_scale=1.0):
    x = x.reshape(*x.shape[:-1], num_branches, -1)
    return reduction_scale * (x * mix[..., None]).sum(-2)


def post_mix(x, block, mix, streams=None, *, num_branches=0):
    grouped = x.reshape(*x.shape[:-1], num_branches, -1)
    mixed = grouped if streams is None else np.swapaxes(streams, -1, -2) @ grouped
    return (mixed + mix[..., None] * block[..., None, :]).reshape(x.shape)


def engram(key, query, value, a, b, c=None, *, epsilon=1e-5):
    d = (rms(key) * a * rms(query) * b).sum(-1, keepdims=True) / np.sqrt(key.shape[-1])
    y = sigmoid(np.sign(d) * np.sqrt(np.maximum(abs(d), 1e-6))) * value[:, :, None]
    return y, rms(y) * c


def gated_bias(q, qb, rel, w, b, a, *, num_heads):
    n, s, _ = q.shape
    heads = (q + qb).reshape(n, s, num_heads, -1).transpose(0, 2, 1, 3)
    gates = sigmoid((heads @ w + b).reshape(n, num_heads, s, 2, -1).sum(-1))
    u, r = gates[..., :1], gates[..., 1:]
    return (u * (r * a - 1) + 2) * rel


def tanh_gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def erf_gelu(z):
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / np.sqrt(2)))


def complex_of(x):
    return x[..., 0] + 1j * x[..., 1]


def pair(z):
    return np.stack([z.real, z.imag], -1)


def _conv(x, w, b):
    y = torch.nn.functional.conv2d(
        torch.tensor(x).permute(0, 3, 1, 2), torch.tensor(w), torch.tensor(b), padding=1
    )
    return y.permute(0, 2, 3, 1).numpy()


GAMMA, BETA = 1 + normal(4), normal(4)[::-1].copy()
FOUR = normal(BATCH, LENGTH, 3, 4)
CASES = {
    "group norm": Case(
        "GroupNorm",
        [IMAGE, GAMMA, BETA],
        {"groups": 2, "activation": 0},
        reference=groups,
        precision=F32,
    ),
    "group norm, silu": Case(
        "GroupNorm",
        [IMAGE.transpose(0, 3, 1, 2).copy(), GAMMA, BETA],
        {"groups": 2, "activation": 1, "channels_last": 0},
        reference=groups,
        precision=F32,
    ),
    "skip group norm": Case(
        "SkipGroupNorm",
        [IMAGE, GAMMA, BETA, normal(BATCH, 4), normal(4)],
        {"groups": 2, "activation": 1},
        ("y", "s"),
        reference=skipped,
        precision=F32,
    ),
    "branches": Case(
        "BranchwiseRMSNorm", [X, 1 + normal(8)], {"num_branches": 2}, reference=branchwise
    ),
    "branches, one scale": Case(
        "BranchwiseRMSNorm", [X, 1 + normal(4)], {"num_branches": 2}, reference=branchwise
    ),
    "gated norm": Case(
        "GatedRMSNorm", [X, 1 + normal(4), X[::-1].copy()], {}, reference=gated_norm
    ),
    "gated norm, sigmoid": Case(
        "GatedRMSNorm",
        [X, 1 + normal(4), X[::-1].copy()],
        {"activation": "sigmoid"},
        reference=gated_norm,
    ),
    "gated add": Case(
        "GatedAdd",
        [X, X[::-1].copy(), normal(BATCH, LENGTH, 1)],
        reference=lambda x, y, g: x + y * g,
    ),
    "scaled silu": Case(
        "ScaledSiLU", [X], {"alpha": 1.3}, reference=lambda x, alpha: alpha * x * sigmoid(alpha * x)
    ),
    "scaled silu by input": Case(
        "ScaledSiLU",
        [X, np.array([0.7], np.float32)],
        reference=lambda x, s: s * x * sigmoid(s * x),
    ),
    "pre mix": Case(
        "HyperConnectionPreMix",
        [X, normal(BATCH, LENGTH, 2)],
        {"num_branches": 2, "reduction_scale": 0.5},
        reference=pre_mix,
    ),
    "post mix": Case(
        "HyperConnectionPostMix",
        [X, normal(BATCH, LENGTH, 4), normal(BATCH, LENGTH, 2), normal(BATCH, LENGTH, 2, 2)],
        {"num_branches": 2},
        reference=post_mix,
    ),
    "engram": Case(
        "EngramGate",
        [FOUR, FOUR[::-1].copy(), normal(BATCH, LENGTH, 4), *(1 + normal(3, 4) for _ in range(3))],
        {},
        ("y", "n"),
        reference=engram,
    ),
    "nhwc conv": Case(
        "NhwcConv",
        [IMAGE, normal(3, 4, 3, 3), normal(3)],
        {"pads": [1, 1, 1, 1]},
        precision=F32,
        reference=lambda x, w, b, pads: _conv(x, w, b),
    ),
    "nhwc fused conv": Case(
        "NhwcFusedConv",
        [IMAGE, normal(3, 4, 3, 3), normal(3)],
        {"pads": [1, 1, 1, 1], "activation": "Tanh"},
        reference=lambda x, w, b, **_: np.tanh(_conv(x, w, b)),
        precision=F32,
    ),
    "bias softmax": Case(
        "BiasSoftmax",
        [normal(2, 3, 5, 5), normal(2, 1, 1, 5)],
        {"axis": 3, "is_inner_broadcast": 1},
        reference=lambda x, b, **_: softmax(x + b),
    ),
    "bias softmax, two axes": Case(
        "BiasSoftmax",
        [normal(2, 3, 5, 5), normal(5, 5)],
        {"axis": 2, "is_inner_broadcast": 0},
        reference=lambda x, b, **_: softmax(x + b, (2, 3)),
    ),
    "bias dropout": Case(
        "BiasDropout", [X, normal(8), X[::-1].copy()], reference=lambda x, b, r: x + b + r
    ),
    "bitmask dropout": Case("BitmaskDropout", [X], reference=lambda x: x),
    "bitmask bias dropout": Case(
        "BitmaskBiasDropout",
        [X, normal(8), X[::-1].copy()],
        {},
        reference=lambda x, b, r: x + b + r,
    ),
    "fused matmul activation": Case(
        "FusedMatMulActivation",
        [X, normal(8, 3)],
        {"activation": "Tanh", "alpha": 0.5},
        reference=lambda a, b, **_: np.tanh(0.5 * a @ b),
    ),
    "gemm fast gelu": Case(
        "GemmFastGelu",
        [X, normal(8, 3), normal(3)],
        reference=lambda x, w, b: tanh_gelu(x @ w + b),
        precision=F32,
    ),
    "bias add": Case(
        "BiasAdd", [X, normal(8), X[::-1].copy()], reference=lambda x, b, s: x + b + s
    ),
    "transpose matmul": Case("TransposeMatMul", [normal(3, 8, 5), normal(3, 8, 4)], {"transA": 1}),
    "inverse": Case(
        "Inverse",
        [np.eye(4, dtype=np.float32)[::-1] + 0.3 * normal(2, 4, 4)],
        {},
        rtol=2e-4,
        atol=2e-4,
    ),
    "complex mul": Case(
        "ComplexMul",
        [normal(3, 4, 2), normal(3, 4, 2)[::-1].copy()],
        reference=lambda a, b: pair(complex_of(a) * complex_of(b)),
    ),
    "complex mul conj": Case(
        "ComplexMulConj",
        [normal(3, 4, 2), normal(3, 4, 2)[::-1].copy()],
        reference=lambda a, b: pair(complex_of(a) * complex_of(b).conj()),
    ),
    "rfft": Case(
        "Rfft",
        [normal(3, 8)],
        {"signal_ndim": 1},
        reference=lambda x, signal_ndim: pair(np.fft.rfft(x)),
    ),
    "irfft": Case(
        "Irfft",
        [normal(3, 5, 2)],
        {"signal_ndim": 1},
        reference=lambda x, signal_ndim: np.fft.irfft(complex_of(x)),
        symbolic=False,
    ),
    "cdist": Case("CDist", [normal(6, 4), normal(3, 4)], {"metric": "euclidean"}),
    "cdist, squares": Case("CDist", [normal(6, 4), normal(3, 4)], {"metric": "sqeuclidean"}),
    "gather nd": Case("GatherND", [normal(3, 4, 6), np.array([[0, 1], [2, 3]])]),
    "grid sample": Case(
        "GridSample", [normal(1, 2, 6, 6), 0.9 * np.tanh(normal(1, 4, 4, 2))], {"align_corners": 1}
    ),
    "pad": Case(
        "Pad",
        [normal(3, 4), np.array([[1, 0, 0, 2]]), np.array([0.5], np.float32)],
        constants=(1,),
        fixed=(2,),
    ),
    "expand dims": Case("ExpandDims", [normal(3, 4), np.array(1, np.int32)], constants=(1,)),
    "embedding": Case(
        "TorchEmbedding", [normal(6, 4), np.array([[0, 5], [1, 1]])], reference=lambda w, i: w[i]
    ),
    "unfold": Case("UnfoldTensor", [normal(3, 7, 4)], {"dim": 1, "size": 3, "step": 2}),
    "conv transpose": Case(
        "ConvTransposeWithDynamicPads",
        [normal(1, 2, 4, 4), normal(2, 3, 3, 3), np.array([1, 1, 1, 1]), normal(3)],
        {"strides": [2, 2]},
        constants=(2,),
        precision=F32,
    ),
    "bias split gelu": Case(
        "BiasSplitGelu",
        [normal(2, 5, 16), normal(16)],
        reference=lambda x, b: (x + b)[..., :8] * erf_gelu((x + b)[..., 8:]),
        precision=F32,
    ),
    "gated bias": Case(
        "GatedRelativePositionBias",
        [
            X,
            normal(8),
            normal(1, 2, LENGTH, LENGTH),
            normal(4, 8),
            normal(8)[::-1].copy(),
            normal(1, 2, 1, 1),
        ],
        {"num_heads": 2},
        reference=gated_bias,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel_or_the_formula(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize(
    "name",
    [
        "branches",
        "branches, one scale",
        "gated norm",
        "gated norm, sigmoid",
        "gated add",
        "scaled silu",
        "pre mix",
        "post mix",
        "engram",
    ],
)
def test_equals_the_kernel_too(name: str) -> None:
    dataclasses.replace(CASES[name], reference=None).check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


IDS = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)
EMBED = [IDS, IDS % 2, normal(20, 8), normal(9, 8), normal(2, 8), 1 + normal(8), normal(8)]


@pytest.mark.parametrize(
    "mask", [None, np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)], ids=["", "mask"]
)
def test_embedding_layer_norm_returns_sequence_lengths(mask) -> None:
    Case("EmbedLayerNormalization", [*EMBED, mask], {}, ("y", "int_lengths")).check_forward()


def test_embedding_sum_and_gradient() -> None:
    positions = IDS % LENGTH
    case = Case(
        "EmbedLayerNormalization",
        [*EMBED, None, positions],
        {},
        ("y", "int_m", "sum"),
    )
    case.check_forward()
    case.check_gradient()


def test_relative_positions_equal_t5() -> None:
    def reference(table, q, k, *, max_distance, is_bidirectional):
        out = np.zeros((1, table.shape[1], int(q[0]), int(k[0])), np.float32)
        for i in range(int(q[0])):
            for j in range(int(k[0])):
                n, buckets, base = i - j, table.shape[0], 0
                if is_bidirectional:
                    buckets //= 2
                    base, n = (buckets if n < 0 else 0), abs(n)
                n = max(n, 0)
                exact = buckets // 2
                if n >= exact:
                    n = exact + int(
                        math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact)
                    )
                out[0, :, i, j] = table[base + min(n, buckets - 1)]
        return out

    for both in (0, 1):
        lengths = [np.array([11]), np.array([11])]
        Case(
            "RelativePositionBias",
            [normal(8, 2), *lengths],
            {"max_distance": 6, "is_bidirectional": both},
            reference=reference,
        ).check_forward()
