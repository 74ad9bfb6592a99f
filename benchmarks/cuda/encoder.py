"""A transformer encoder of GPT-2's size, built from torch's own layers."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """Embedding, six encoder layers of width 768 with a causal mask, decoder; [batch, words]."""

    def __init__(self, tokens: int = 8000, width: int = 768, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.embed, self.places = nn.Embedding(tokens, width), nn.Embedding(128, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, tokens)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores of the next word at each place."""
        length, device = words.shape[1], words.device
        mask = torch.triu(torch.full((length, length), float("-inf"), device=device), diagonal=1)
        x = self.embed(words) + self.places(torch.arange(length, device=device))
        return self.decoder(self.encoder(x, mask=mask, is_causal=True)).reshape(-1, self.tokens)
