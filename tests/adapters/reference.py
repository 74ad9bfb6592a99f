"""The small decoders in plain torch, with low-rank adapters written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from onnxtrain.adapters import Adapted
from tests.adapters.decoders import GROUPS, HEAD, HEADS, INNER, LAYERS, Decoder

Weight = Callable[[str], torch.Tensor]
QKV = (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD)


@dataclasses.dataclass
class Branch:
    """Factors of one adapter in torch's layout, and the magnitudes of DoRA."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None

    def turned(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights [outputs, inputs] that the adapter makes of frozen ones."""
        whole = weight + self.scaling * self.b @ self.a
        if self.magnitude is None:
            return whole
        length = torch.linalg.norm(whole, dim=1, keepdim=True).detach()
        return whole * self.magnitude[:, None] / length


def branches_of(adapted: Adapted, values: dict[str, np.ndarray]) -> dict[str, Branch]:
    """Return the adapters by module, as leaves of torch."""

    def leaf(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float64, requires_grad=True)

    return {
        a.module: Branch(
            leaf(values[a.a].T),
            leaf(values[a.b].T),
            a.scaling,
            None if a.magnitude is None else leaf(values[a.magnitude]),
        )
        for a in adapted.adapters
    }


def weights_of(decoder: Decoder, branches: dict[str, Branch]) -> Weight:
    """Return a function that gives the weights of a module, adapters included."""
    frozen = {n: torch.tensor(w, dtype=torch.float64) for n, w in decoder.weights.items()}
    whole: dict[str, torch.Tensor] = {}
    for i in range(LAYERS):
        stem = f"model.layers.{i}"
        packed = {
            f"{stem}.self_attn.qkv_proj": ([f"{stem}.self_attn.{p}_proj" for p in "qkv"], QKV),
            f"{stem}.mlp.gate_up_proj": (
                [f"{stem}.mlp.{p}_proj" for p in ("gate", "up")],
                (INNER, INNER),
            ),
        }
        for module, (parts, widths) in packed.items():
            if module in branches:
                together = branches[module].turned(torch.cat([frozen[p] for p in parts]))
                whole.update(zip(parts, together.split(widths), strict=True))
    for module, branch in branches.items():
        if module in frozen and "embed" not in module:
            whole[module] = branch.turned(frozen[module])
    return lambda module: whole.get(module, frozen[module])


def logits(weight: Weight, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of a batch that is padded on the right."""
    x = weight("model.embed_tokens")[ids]
    for i in range(LAYERS):
        stem = f"model.layers.{i}"
        h = _rms(x, weight(f"{stem}.input_layernorm"))
        q, k, v = (F.linear(h, weight(f"{stem}.self_attn.{p}_proj")) for p in "qkv")
        x = x + F.linear(_attention(q, k, v, mask), weight(f"{stem}.self_attn.o_proj"))
        h = _rms(x, weight(f"{stem}.post_attention_layernorm"))
        gate, up = (F.linear(h, weight(f"{stem}.mlp.{p}_proj")) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weight(f"{stem}.mlp.down_proj"))
    return F.linear(_rms(x, weight("model.norm")), weight("lm_head"))


def _rms(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * scale


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    rows, length, _ = q.shape
    q, k, v = (
        t.reshape(rows, length, n, HEAD).transpose(1, 2)
        for t, n in ((q, HEADS), (k, GROUPS), (v, GROUPS))
    )
    angles = torch.outer(
        torch.arange(length).double(), 10000.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    )
    cos, sin = angles.cos(), angles.sin()

    def turned(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (turned(k), v))
    scores = turned(q) @ k.transpose(-1, -2) * HEAD**-0.5
    seen = torch.tril(torch.ones(length, length, dtype=torch.bool)) & mask.bool()[:, None, None, :]
    return (
        (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
        .transpose(1, 2)
        .reshape(rows, length, -1)
    )
