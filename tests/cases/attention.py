"""Cases for attention and rotary embeddings, at the opsets that have them."""

from __future__ import annotations

import math

import torch

from tests.cases.base import Draw, OpCase, between, bools, const, f, fixed, ints

LENGTHS = [2, 4]
MASK = [[True, False, True, True, False], [False, True, True, False, False], [True] * 5]
NO_KEYS = [[True, False, True, True, False], [False] * 5, [True] * 5]


def attend(
    heads: tuple[int, int] | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    gives: str = "y",
    mode: int = 0,
):
    """Attention as the standard defines it; ``gives`` picks y, p (both caches) and s (scores)."""

    def run(q, k, v, mask=None, past_k=None, past_v=None, lengths=None):
        if heads is not None:
            split = lambda x, n: x.unflatten(-1, (n, -1)).transpose(1, 2)  # noqa: E731
            q, k, v = split(q, heads[0]), split(k, heads[1]), split(v, heads[1])
        if past_k is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        present = k, v
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        raw = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        capped = softcap * torch.tanh(raw / softcap) if softcap else raw
        row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        if past_k is not None:
            row = row + past_k.shape[2]
        elif lengths is not None:
            row = row + (lengths - q.shape[2])[:, None, None, None]
        allowed = torch.ones(row.shape[:-1] + column.shape, dtype=torch.bool)
        if causal:
            allowed = allowed & (column <= row)
        if left >= 0:
            allowed = allowed & (column >= row - left)
        if right >= 0:
            allowed = allowed & (column <= row + right)
        if lengths is not None:
            allowed = allowed & (column < lengths[:, None, None, None])
        biased = capped
        if mask is not None:
            wide = mask.new_full((*mask.shape[:-1], k.shape[2] - mask.shape[-1]), 0)
            if mask.dtype == torch.bool:
                allowed = allowed & torch.cat([mask, wide], -1)
            else:
                biased = capped + torch.cat([mask, wide - math.inf], -1)
        biased = biased.masked_fill(~allowed, -math.inf)
        empty = biased.detach().isneginf().all(-1, keepdim=True)
        p = torch.softmax(biased.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        y = p @ v
        made = {
            "y": [y if heads is None else y.transpose(1, 2).flatten(2)],
            "p": list(present),
            "s": [(raw, capped, biased, p)[mode]],
        }
        return tuple(t for letter in gives for t in made[letter])

    return run


def rotate(*, flat: int = 0, size: int = 0, interleaved: bool = False):
    """RotaryEmbedding."""

    def run(x, cos, sin, positions=None):
        shape = x.shape
        x = x.unflatten(-1, (flat, -1)).transpose(1, 2) if flat else x
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        cos, sin = cos[:, None], sin[:, None]
        n = size or x.shape[-1]
        turning, rest = x[..., :n], x[..., n:]
        if interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        y = torch.cat([turned, rest], -1)
        return y.transpose(1, 2).reshape(shape) if flat else y

    return run


def qkv(queries: int = 3, keys: int = 5, heads: int = 2, shared: int = 2) -> tuple[Draw, ...]:
    """Query, key and value of shape [batch, heads, length, size]."""
    return f(2, heads, queries, 4), f(2, shared, keys, 4), f(2, shared, keys, 3)


def flat_qkv(heads: int = 4, shared: int = 2) -> tuple[Draw, ...]:
    """The same as [batch, length, heads * size]."""
    return f(2, 3, heads * 4), f(2, 5, shared * 4), f(2, 5, shared * 3)


def attention(
    id: str, inputs, attrs=None, opset: int = 23, outputs=1, forward="reference", **oracle
) -> OpCase:
    """A case of Attention; ``oracle`` says again what the attributes say."""
    return OpCase(
        *("Attention", inputs, attrs or {}, attend(**oracle)),
        id=id,
        opset=opset,
        outputs=outputs,
        forward=forward,
    )


def rotary(id: str, inputs, attrs=None, opset: int = 23, **oracle) -> OpCase:
    """A case of RotaryEmbedding, which has no float64 form."""
    return OpCase(
        *("RotaryEmbedding", inputs, attrs or {}, rotate(**oracle)),
        id=id,
        opset=opset,
        forward="torch",
    )


CACHE = f(2, 2, 2, 4), f(2, 2, 2, 3)
LAST_ROW_MASKED = bools([[True] * 5] * 4 + [[False] * 5])
INFINITE = const([[0.0, -math.inf, 0.5, 0.0, 0.0]] * 3)
SCORES = ("y", "", "", "scores")
COS, SIN = between(-1, 1, 7, 3), between(-1, 1, 7, 3)
POSITIONS = ints([[0, 1, 2, 3], [3, 2, 6, 0]])

CASES = [
    attention("plain", qkv()),
    attention("shared-keys", qkv(heads=6), opset=24),
    attention("one-key-head", qkv(heads=3, shared=1), {"scale": 0.3}, 25, scale=0.3),
    attention("flat", flat_qkv(), {"q_num_heads": 4, "kv_num_heads": 2}, heads=(4, 2)),
    attention(
        *("flat-causal", flat_qkv(2), {"q_num_heads": 2, "kv_num_heads": 2, "is_causal": 1}, 26),
        heads=(2, 2),
        causal=True,
    ),
    attention("causal-mask", (*qkv(5), LAST_ROW_MASKED), {"is_causal": 1}, causal=True),
    attention("mask", (*qkv(), bools(MASK))),
    attention("row-without-keys", (*qkv(), bools(NO_KEYS)), opset=24),
    attention("bias", (*qkv(), f(2, 1, 3, 5)), {"softcap": 1.5}, softcap=1.5),
    attention("short-bias", (*qkv(), f(3, 3)), opset=24),
    attention("infinite-bias", (*qkv(), INFINITE), {"is_causal": 1}, 26, causal=True),
    attention(
        *("cache", (*qkv(3, 3), None, *CACHE), {"is_causal": 1}, 23, 3), causal=True, gives="yp"
    ),
    attention(
        *("lengths", (*qkv(), None, None, None, ints(LENGTHS)), {"is_causal": 1}, 24), causal=True
    ),
    attention(
        "window",
        (*qkv(4, 6), None),
        {"left_window_size": 1, "right_window_size": 1},
        25,
        left=1,
        right=1,
    ),
    # The reference evaluator gives capped scores here; onnxruntime and the text say raw ones.
    attention("raw-scores", qkv(), {"softcap": 2.0}, 25, SCORES, "torch", softcap=2.0, gives="ys"),
    attention(
        *("capped", qkv(), {"softcap": 2.0, "qk_matmul_output_mode": 1}, 24, SCORES),
        softcap=2.0,
        gives="ys",
        mode=1,
    ),
    attention(
        *("biased", (*qkv(), f(3, 5)), {"qk_matmul_output_mode": 2}, 23, SCORES),
        gives="ys",
        mode=2,
    ),
    attention(
        *("probabilities", (*qkv(), bools(NO_KEYS)), {"qk_matmul_output_mode": 3}, 25, SCORES),
        gives="ys",
        mode=3,
    ),
    attention("softmax-precision", qkv(), {"softmax_precision": 1}, forward="torch"),
    rotary("plain", (f(2, 2, 4, 6), COS, SIN, POSITIONS)),
    rotary(
        *("interleaved", (f(2, 2, 4, 6), f(2, 4, 3), f(2, 4, 3)), {"interleaved": 1}, 24),
        interleaved=True,
    ),
    rotary("part", (f(2, 2, 4, 8), COS, SIN, POSITIONS), {"rotary_embedding_dim": 6}, 26, size=6),
    rotary("flat", (f(2, 4, 12), fixed(COS), fixed(SIN), POSITIONS), {"num_heads": 2}, flat=2),
    rotary(
        "flat-part-interleaved",
        (f(2, 4, 16), f(2, 4, 3), f(2, 4, 3)),
        {"num_heads": 2, "rotary_embedding_dim": 6, "interleaved": 1},
        flat=2,
        size=6,
        interleaved=True,
    ),
]
