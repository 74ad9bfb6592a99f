"""An encoder of BERT-base's size with a classifier, for torch and PEFT and for export."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, WIDTH, INNER, LAYERS, HEADS, LENGTH, CLASSES = 30522, 768, 3072, 12, 12, 512, 2
LINEAR = ("query", "key", "value", "mixed", "inner", "outer")
"""The layers that get adapters."""


class Layer(nn.Module):
    """Attention and two wide layers, each with its sum and norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of all positions."""
        heads = [
            p(x).view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        ]
        y = nn.functional.scaled_dot_product_attention(*heads)
        x = self.first(x + self.mixed(y.transpose(1, 2).flatten(2)))
        return self.second(x + self.outer(nn.functional.gelu(self.inner(x))))


class Encoder(nn.Module):
    """Words and places, layers, and a classifier of the first position."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(layers))
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.words(input_ids) + self.places(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x[:, 0])
