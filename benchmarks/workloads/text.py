"""Language models, in plain torch; all return scores ``[words, vocabulary]``."""

from __future__ import annotations

import math

import torch
from torch import nn


class TransformerLM(nn.Module):
    """Embedding, positions, two encoder layers with a causal mask, decoder; [bptt, batch] words."""

    def __init__(
        self, tokens: int, size: int = 200, heads: int = 2, hidden: int = 200, layers: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size, self.tokens = size, tokens
        self.embed = nn.Embedding(tokens, size)
        layer = nn.TransformerEncoderLayer(size, heads, hidden, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(size, tokens)
        angles = torch.arange(64.0)[:, None] * torch.exp(
            torch.arange(0, size, 2) * (-math.log(10000.0) / size)
        )
        table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
        self.register_buffer("positions", table[:, None, :], persistent=False)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place."""
        length = words.shape[0]
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        x = self.embed(words) * math.sqrt(self.size) + self.positions[:length]
        y = self.encoder(x, mask=mask, is_causal=True)
        return self.decoder(y).reshape(-1, self.tokens)


class GruLM(nn.Module):
    """Embedding, two GRU layers, decoder; [bptt, batch] words."""

    def __init__(self, tokens: int, size: int = 200, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.embed = nn.Embedding(tokens, size)
        self.gru = nn.GRU(size, size, layers)
        self.decoder = nn.Linear(size, tokens)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place."""
        y, _ = self.gru(self.embed(words))
        return self.decoder(y).reshape(-1, self.tokens)


class Block(nn.Module):
    """Causal attention and a dense part, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        batch, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        q, k, v = (
            t.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A decoder in the manner of GPT-2: learned places, output tied to the embedding."""

    def __init__(
        self, tokens: int, width: int = 256, layers: int = 4, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.wte, self.wpe = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place."""
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        y = self.ln_f(self.h(x))
        return nn.functional.linear(y, self.wte.weight).reshape(-1, self.tokens)


class TanhGelu(nn.Module):
    """GELU by a tanh, in elementwise operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return GELU of x, approximately."""
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class MaskedLM(nn.Module):
    """A BERT-like encoder with token types, a padding mask and tied scores; [batch, words]."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.embed, self.types = nn.Embedding(tokens, width), nn.Embedding(2, width)
        self.places, self.norm = nn.Embedding(context, width), nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation=TanhGelu(), batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.decoder.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the word at each place; word 0 is padding."""
        types = (words % 2).long()
        x = self.embed(words) + self.types(types) + self.places(torch.arange(words.shape[1]))
        y = self.encoder(self.norm(x), src_key_padding_mask=words == 0)
        return self.decoder(y).reshape(-1, self.tokens)


class RMSNorm(nn.Module):
    """Normalization by the root mean square, as Llama writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return normalized rows."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LlamaBlock(nn.Module):
    """Causal attention with rotary embedding and a SwiGLU layer, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = width * 8 // 3 // 64 * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the block's features."""
        batch, length, width = x.shape
        y = self.input_norm(x)
        q, k, v = (
            layer(y).reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.post_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder like Llama: RMS norms, rotary embedding, SwiGLU, a boolean causal mask."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.size = tokens, width // heads
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place."""
        length, device = words.shape[1], words.device
        rates = 10000.0 ** (-torch.arange(0, self.size, 2, device=device) / self.size)
        angles = torch.arange(length, device=device)[:, None] * rates
        angles = torch.cat([angles, angles], dim=-1)
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x)).reshape(-1, self.tokens)


class AudioEncoder(nn.Module):
    """Whisper-like encoder: two convolutions over frames, attention over a long sequence."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv1d(80, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(_AudioBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores for spectrograms ``[batch, 80, frames]``."""
        x = nn.functional.gelu(self.conv2(nn.functional.gelu(self.conv1(x)))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _AudioBlock(nn.Module):
    """Attention without a mask and a GELU layer, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))
