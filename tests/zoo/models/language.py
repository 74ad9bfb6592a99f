"""Language and speech transformers: BERT, GPT-2, LLaMA, T5, Whisper, a causal encoder LM, MoE."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Block, RmsNorm, join_heads, split_heads
from .base import integers, normal, register

VOCABULARY, WIDTH, LENGTH = 24, 16, 6


@register("bert", integers(24, 6), integers(2, 6), integers(7, low=2), dropout=True)
class Bert(nn.Module):
    """Token, position and segment embeddings, post-norm layers, padding mask, tanh pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position, self.segment = nn.Embedding(LENGTH, WIDTH), nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.attention = nn.ModuleList(Attention(WIDTH, 2) for _ in range(2))
        self.norm1 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.norm2 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(2))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, token: Tensor, segment: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(token.shape[1])
        x = self.token(token) + self.position(place) + self.segment(segment)
        x = self.dropout(self.norm(x))
        visible = (place[None, :] < length[:, None])[:, None, None, :]
        bias = torch.zeros_like(visible, dtype=x.dtype).masked_fill(~visible, -1e4)
        for index, attention in enumerate(self.attention):
            x = self.norm1[index](x + self.dropout(attention(x, mask=bias)))
            hidden = F.gelu(self.up[index](x))
            x = self.norm2[index](x + self.dropout(self.down[index](hidden)))
        return self.head(torch.tanh(self.pooler(x[:, 0]))), x


@register("gpt2", integers(24, 6), dropout=True, fast=True)
class Gpt2(nn.Module):
    """Fused qkv, a masked softmax written out, tanh GELU, output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.ln_1 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ln_2 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.c_attn = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.c_proj = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.c_fc = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(2))
        self.c_out = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("visible", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def attend(self, index: int, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, 2) for part in self.c_attn[index](x).split(WIDTH, dim=2))
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        low = torch.finfo(logits.dtype).min
        logits = torch.where(self.visible[: x.shape[1], : x.shape[1]], logits, low)
        return self.c_proj[index](join_heads(self.drop(torch.softmax(logits, dim=-1)) @ v))

    def forward(self, token: Tensor) -> Tensor:
        x = self.drop(self.wte(token) + self.wpe(torch.arange(token.shape[1])))
        for index in range(2):
            x = x + self.attend(index, self.ln_1[index](x))
            hidden = F.gelu(self.c_fc[index](self.ln_2[index](x)), approximate="tanh")
            x = x + self.c_out[index](hidden)
        return self.lm_head(self.ln_f(x))


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, gated SiLU MLP, RMS norms."""

    def __init__(self, norm, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        size = WIDTH // heads
        self.heads, self.shared = heads, shared
        self.q, self.out = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.k = nn.Linear(WIDTH, shared * size, False)
        self.v = nn.Linear(WIDTH, shared * size, False)
        self.gate, self.up = nn.Linear(WIDTH, 24, False), nn.Linear(WIDTH, 24, False)
        self.down = nn.Linear(24, WIDTH, False)
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.rotate(split_heads(self.q(y), self.heads), cos, sin)
        k = self.rotate(split_heads(self.k(y), self.shared), cos, sin)
        v = split_heads(self.v(y), self.shared)
        n, _, t, d = k.shape
        repeat = self.heads // self.shared
        k, v = (
            part[:, :, None].expand(n, self.shared, repeat, t, d).reshape(n, self.heads, t, d)
            for part in (k, v)
        )
        x = x + self.out(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder without biases; positions enter by rotation."""

    def __init__(self, norm=RmsNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(norm) for _ in range(2))
        self.norm = norm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("rates", 100.0 ** (-torch.arange(0, 4, 2) / 4.0))

    def forward(self, token: Tensor) -> Tensor:
        angle = torch.arange(token.shape[1])[:, None] * self.rates
        angle = torch.cat([angle, angle], dim=-1)
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return self.lm_head(self.norm(x))


@register("llama", integers(24, 6))
def llama() -> nn.Module:
    return Llama()


@register("llama_opset23", integers(24, 6), opset=23)
def llama_opset23() -> nn.Module:
    return Llama(norm=lambda width: nn.RMSNorm(width, eps=1e-6))


class T5Attention(nn.Module):
    """Unscaled attention with a learned bias by bucketed distance."""

    def __init__(self, bidirectional: bool | None) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.q, self.k = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.distance = None if bidirectional is None else nn.Embedding(8, 2)

    def bias(self, length: int) -> Tensor:
        place = torch.arange(length)
        offset = place[None, :] - place[:, None]
        if self.bidirectional:
            bucket = offset.abs().clamp(max=3) + (offset > 0).long() * 4
        else:
            near = (-offset).clamp(min=0)
            far = 4 + (torch.log(near.clamp(min=1).float() / 4) / math.log(4.0) * 4).long()
            bucket = torch.where(near < 4, near, far.clamp(max=7))
        return self.distance(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k = split_heads(self.q(x), 2), split_heads(self.k(source), 2)
        logits = q @ k.transpose(2, 3)
        if self.distance is not None:
            logits = logits + self.bias(x.shape[1])
        if self.bidirectional is False:
            hidden = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
            logits = logits.masked_fill(hidden, -1e9)
        share = torch.softmax(logits, dim=-1)
        return self.out(join_heads(share @ split_heads(self.v(source), 2)))


@register("t5", integers(24, 6), integers(24, 5))
class T5(nn.Module):
    """Encoder and decoder with RMS norms, ReLU MLPs, tied and scaled output."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encode, self.decode, self.cross = (
            T5Attention(True),
            T5Attention(False),
            T5Attention(None),
        )
        self.norms = nn.ModuleList(RmsNorm(WIDTH) for _ in range(7))
        self.wi = nn.ModuleList(nn.Linear(WIDTH, 24, False) for _ in range(2))
        self.wo = nn.ModuleList(nn.Linear(24, WIDTH, False) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.shared(source)
        x = x + self.encode(self.norms[0](x))
        x = x + self.wo[0](torch.relu(self.wi[0](self.norms[1](x))))
        memory = self.norms[2](x)
        y = self.shared(target)
        y = y + self.decode(self.norms[3](y))
        y = y + self.cross(self.norms[4](y), memory)
        y = y + self.wo[1](torch.relu(self.wi[1](self.norms[5](y))))
        return F.linear(self.norms[6](y) * WIDTH**-0.5, self.shared.weight)


@register("whisper", normal(5, 16), integers(24, 6))
class Whisper(nn.Module):
    """Two 1-d convolutions on the spectrogram, sinusoids, encoder, cross-attending decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(5, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        rate = torch.exp(-math.log(10000.0) / (WIDTH // 2 - 1) * torch.arange(WIDTH // 2))
        angle = torch.arange(8)[:, None] * rate[None]
        self.register_buffer("sinusoids", torch.cat([angle.sin(), angle.cos()], dim=1))
        self.encoder = Block(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.decoder = Block(WIDTH, 2, cross=True)
        self.final = nn.LayerNorm(WIDTH)

    def forward(self, audio: Tensor, token: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(audio)))).permute(0, 2, 1)
        memory = self.norm(self.encoder(x + self.sinusoids))
        y = self.token(token) + self.position[: token.shape[-1]]
        y = self.final(self.decoder(y, memory, causal=True))
        return y @ self.token.weight.transpose(0, 1)


@register("transformer_lm", integers(24, 6), dropout=True)
class TransformerLm(nn.Module):
    """torch's own encoder with a causal mask, as its language modelling tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token) * math.sqrt(WIDTH) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        x = self.encoder(x, mask=mask, is_causal=True)
        return F.log_softmax(self.head(x), dim=-1)


@register("moe", normal(5, 12), fast=True)
class MixtureOfExperts(nn.Module):
    """The two best of four experts per token, mixed by their renormalized gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(4, 12, 16))
        self.down = nn.Parameter(0.3 * torch.randn(4, 16, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        value, index = torch.topk(logits, 2, dim=-1)
        share = torch.zeros_like(logits).scatter(-1, index, torch.softmax(value, dim=-1))
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        experts = torch.einsum("bteh,ehd->bted", hidden, self.down)
        mixed = x + (share.unsqueeze(-1) * experts).sum(dim=2)
        load = torch.softmax(logits, dim=-1).mean(dim=(0, 1))
        return mixed, 4 * (load * load).sum()
