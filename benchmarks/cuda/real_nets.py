"""Popular nets from their own libraries, without dropout so that losses compare.

Each entry has a module that maps a batch to scores ``[rows, classes]``, and a batch with labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Net:
    """A module, and a batch for it."""

    title: str
    module: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Scores(nn.Module):
    """Gives the scores of a model of the transformers library, one row per prediction."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, classes]."""
        scores = self.inner(x, return_dict=True).logits
        return scores.reshape(-1, scores.shape[-1])


def words(rows: int, length: int, vocabulary: int, labels: int | None = None) -> Any:
    """Return random words, and a label for each, or for each row."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, vocabulary, (rows, length), generator=g)
    if labels is None:
        return x, torch.randint(0, vocabulary, (rows * length,), generator=g)
    return x, torch.randint(0, labels, (rows,), generator=g)


def images(rows: int, size: int, classes: int = 1000) -> Any:
    """Return random images and labels."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, size, size, generator=g)
    return x, torch.randint(0, classes, (rows,), generator=g)


def gpt2(size: str = "small") -> nn.Module:
    """Return GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "small": {},
        "large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    }
    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes[size]
    )
    return Scores(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    """Return BERT-base as a classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Scores(BertForSequenceClassification(config))


def smollm2() -> nn.Module:
    """Return a Llama of the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Scores(LlamaForCausalLM(config))


class Listener(nn.Module):
    """Whisper's encoder with a head on its mean."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        config = WhisperConfig(dropout=0.0, encoder_layerdrop=0.0)
        config.d_model, config.encoder_layers, config.encoder_attention_heads = 384, 4, 6
        config.encoder_ffn_dim = 1536
        self.encoder, self.head = WhisperEncoder(config), nn.Linear(384, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, 35] for [rows, 80, 3000]."""
        return self.head(self.encoder(x, return_dict=True).last_hidden_state.mean(1))


class Block(nn.Module):
    """Two convolutions with group normalization and a way around them, as in diffusion nets."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.around = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, b, ...]."""
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        return self.conv2(nn.functional.silu(self.norm2(y))) + self.around(x)


class UNet(nn.Module):
    """Three levels down and up; scores of 8 classes at each position."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w = width
        self.first = nn.Conv2d(3, w, 3, padding=1)
        self.down = nn.ModuleList([Block(w, w), Block(w, 2 * w), Block(2 * w, 4 * w)])
        self.smaller = nn.ModuleList([nn.Conv2d(n * w, n * w, 3, 2, 1) for n in (1, 2)])
        self.up = nn.ModuleList([Block(4 * w + 2 * w, 2 * w), Block(2 * w + w, w)])
        self.last = nn.Conv2d(w, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows * positions, 8]."""
        a = self.down[0](self.first(x))
        b = self.down[1](self.smaller[0](a))
        y = self.down[2](self.smaller[1](b))
        for block, kept in zip(self.up, (b, a), strict=True):
            y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
            y = block(torch.cat([y, kept], 1))
        return self.last(y).permute(0, 2, 3, 1).reshape(-1, 8)


def unet_batch(rows: int = 16, size: int = 64) -> Any:
    """Return random images and a label for each position."""
    x, _ = images(rows, size)
    return x, torch.randint(0, 8, (rows * size * size,), generator=torch.Generator().manual_seed(0))


def vision(name: str, **options: Any) -> nn.Module:
    """Return a net of torchvision."""
    import torchvision

    return getattr(torchvision.models, name)(**options)


def listener_batch() -> Any:
    """Return random spectrograms and labels."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 80, 3000, generator=g), torch.randint(0, 35, (8,), generator=g)


REAL = {
    "gpt2": Net("GPT-2 124M, 8x512", gpt2, lambda: words(8, 512, 50257)),
    "bert": Net("BERT-base, 32x128", bert, lambda: words(32, 128, 30522, 2)),
    "vit": Net("ViT-B/16, 32", lambda: vision("vit_b_16"), lambda: images(32, 224)),
    "resnet50": Net("ResNet-50, 64", lambda: vision("resnet50"), lambda: images(64, 224)),
    "mobilenet": Net(
        "MobileNetV3-L, 64",
        lambda: vision("mobilenet_v3_large", dropout=0.0),
        lambda: images(64, 224),
    ),
    "smollm2": Net("SmolLM2-135M shape, 4x512", smollm2, lambda: words(4, 512, 49152)),
    "unet": Net("U-Net, 16 x 64x64", UNet, unet_batch),
    "whisper": Net("Whisper-tiny encoder, 8", Listener, listener_batch),
    "gpt2-large": Net("GPT-2 774M, 4x512", lambda: gpt2("large"), lambda: words(4, 512, 50257)),
}
