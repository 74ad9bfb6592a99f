"""GroupQueryAttention agrees with onnxruntime's kernel, with and without a cache."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnxtrain
from tests.graph.contrib.fused_case import BATCH, LENGTH, PAST, Case, normal

N, K, H = 4, 2, 16
Q, KV = normal(BATCH, LENGTH, N * H), normal(BATCH, LENGTH, K * H)
V = normal(BATCH, LENGTH, K * H)[::-1].copy()
PACKED = normal(BATCH, LENGTH, (N + 2 * K) * H)
FULL = np.full(BATCH, LENGTH - 1, np.int32)
PADDED = np.array([LENGTH - 1, LENGTH - 3], np.int32)
TOTAL = np.array(LENGTH, np.int32)
ANGLES = np.outer(np.arange(32), 10000.0 ** (-np.arange(H // 2) / (H // 2)))
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
HEADS = {"num_heads": N, "kv_num_heads": K}
OLD = normal(1, K, PAST, H), normal(1, K, PAST, H)[..., ::-1].copy()


def gqa(
    x, k=None, v=None, *, past=(None, None), lens=FULL, total=TOTAL, cos=None, more=(), **attributes
):
    cache = (COS, SIN) if cos else (None, None)
    attributes = {**HEADS, **({"do_rotary": 1} if cos else {}), **attributes}
    inputs = [x, k, v, *past, lens, total, *cache, *more]
    # The kernel requires caches as outputs; the gradient is that of the first output.
    return Case("GroupQueryAttention", inputs, attributes, ("y", "k", "v"), fixed=(7, 8))


CASES = {
    "separate": gqa(Q, KV, V),
    "packed": gqa(PACKED),
    "rotary": gqa(PACKED, cos=True),
    "interleaved": gqa(PACKED, cos=True, rotary_interleaved=1),
    "scale": gqa(PACKED, scale=0.3),
    "softcap": gqa(Q, KV, V, softcap=2.0),
    "window": gqa(Q, KV, V, local_window_size=2),
    "smooth": gqa(Q, KV, V, smooth_softmax=1),
    "sink": gqa(Q, KV, V, more=(None, None, normal(N))),
    "bias": gqa(Q, KV, V, more=(None, normal(1, N, LENGTH, LENGTH))),
    "both ways": gqa(Q, KV, V, causal=0),
    "padding": gqa(PACKED, lens=PADDED, cos=True),
    "first position": gqa(PACKED, cos=True, more=(np.tile(np.arange(3, 3 + LENGTH), (BATCH, 1)),)),
    "empty past": gqa(PACKED, past=(normal(BATCH, K, 0, H), normal(BATCH, K, 0, H)), cos=True),
}
ONE = {"lens": np.array([PAST + LENGTH - 1], np.int32), "total": np.array(PAST + LENGTH, np.int32)}
WIDE = normal(1, N, LENGTH, PAST + LENGTH)
BEHIND = np.arange(PAST, PAST + LENGTH)[None]
CASES |= {
    "past": gqa(PACKED[:1], past=OLD, cos=True, **ONE),
    "past window": gqa(Q[:1], KV[:1], V[:1], past=OLD, local_window_size=3, **ONE),
    "past bias": gqa(Q[:1], KV[:1], V[:1], past=OLD, more=(None, WIDE), **ONE),
    "past positions": gqa(PACKED[:1], past=OLD, cos=True, more=(BEHIND,), **ONE),
    "uneven past": gqa(
        PACKED[:, :1],
        past=(normal(BATCH, K, PAST, H), normal(BATCH, K, PAST, H)[..., ::-1].copy()),
        lens=np.array([PAST, PAST - 1], np.int32),
        total=np.array(PAST + 1, np.int32),
        cos=True,
    ),
}


def windowed(capacity: int, seen: int, length: int) -> Case:
    """A cache of the last positions only; it is full after the call, other rows are undefined."""
    past = normal(1, K, capacity, H), normal(1, K, capacity, H)[..., ::-1].copy()
    return gqa(
        PACKED[:1, :length],
        past=past,
        cos=True,
        local_window_size=3,
        sliding_window_cache=1,
        lens=np.array([seen + length - 1], np.int32),
        total=np.array(seen + length, np.int32),
    )


CASES |= {
    "a prompt into a window": windowed(LENGTH, 0, LENGTH),
    "a window just full": windowed(6, 5, 1),
    "a window that forgets": windowed(4, 9, 1),
    "a window that forgets while it reads": windowed(4, 3, LENGTH),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def test_norms_of_queries_and_keys_equal_torch() -> None:
    weights = 1 + normal(H), 1 + normal(H)[::-1].copy()

    def reference(q, k, v, *rest, **_):
        def heads(x, n):
            return torch.tensor(x).reshape(BATCH, LENGTH, n, H).transpose(1, 2)

        q, k = heads(q, N), heads(k, K)
        q = torch.nn.functional.rms_norm(q, (H,), torch.tensor(weights[0]), 1e-6)
        k = torch.nn.functional.rms_norm(k, (H,), torch.tensor(weights[1]), 1e-6)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, heads(v, K), is_causal=True, enable_gqa=True
        )
        return (
            y.transpose(1, 2).reshape(BATCH, LENGTH, N * H).numpy(),
            k.numpy(),
            heads(v, K).numpy(),
        )

    inputs = [Q, KV, V, None, None, FULL, TOTAL, *[None] * 7, *weights]
    case = Case("GroupQueryAttention", inputs, HEADS, ("y", "k", "v"), reference=reference)
    case.check_forward()
    case.check_gradient()


def test_quantized_cache_raises() -> None:
    case = gqa(PACKED, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR")
    with pytest.raises(onnxtrain.errors.PrepareError, match="quantized cache"):
        onnxtrain.vjp(case.model(), "x0")


def test_output_types_are_inferred_without_value_info() -> None:
    model = CASES["rotary"].model()
    del model.graph.output[1:]
    model.graph.node[0].output[0] = "inside"
    model.graph.node.append(onnx.NodeProto(op_type="Relu", input=["inside"], output=["y"]))
    assert onnxtrain.explain(model, wrt="x0").differentiable
