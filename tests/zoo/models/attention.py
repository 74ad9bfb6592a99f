"""Transformer building blocks shared by the vision and language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[N, T, H * D] -> [N, H, T, D]``."""
    n, t, width = x.shape
    return x.view(n, t, heads, width // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``[N, H, T, D] -> [N, T, H * D]``."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention over ``memory`` (itself by default), by torch's fused function."""

    def __init__(self, width: int, heads: int, bias: bool = True, scale: float | None = None):
        super().__init__()
        self.heads, self.scale = heads, scale
        self.q = nn.Linear(width, width, bias)
        self.k, self.v = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask=None, causal=False) -> Tensor:
        memory = x if memory is None else memory
        q = split_heads(self.q(x), self.heads)
        k, v = split_heads(self.k(memory), self.heads), split_heads(self.v(memory), self.heads)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale
        )
        return self.out(join_heads(y))


class Mlp(nn.Module):
    """Two linear layers with a GELU, exact or by tanh."""

    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """Pre-norm self-attention, optional cross-attention, MLP."""

    def __init__(self, width: int, heads: int, cross: bool = False, approximate="none") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = Mlp(width, 2 * width, approximate)
        self.norm_cross = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads) if cross else None

    def forward(self, x: Tensor, memory=None, mask=None, causal: bool = False) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask, causal=causal)
        if self.cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.mlp(self.norm2(x))


class RmsNorm(nn.Module):
    """Root-mean-square norm as LLaMA and T5 write it out."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
