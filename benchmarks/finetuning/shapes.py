"""Sizes of the decoders, for both sides."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, by the names of its config.json."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    positions: int = 2048

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


SHAPES = {
    "smollm2-135m": Shape(49152, 576, 1536, 30, 9, 3),
    "1b": Shape(128256, 2048, 8192, 16, 32, 8),
    "tiny": Shape(8192, 64, 128, 2, 4, 2),
}
"""SmolLM2-135M, Llama-3.2-1B, and one for tests."""
