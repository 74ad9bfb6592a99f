"""What a model will be shown: some examples, and which of their tokens are learned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onnxtrain.text.examples import IGNORED, Example
from onnxtrain.text.tokenizer import Tokenizer

_LONGEST = 400  # characters of one part


def preview(examples: Sequence[Example], tokenizer: Tokenizer | None, count: int = 3) -> str:
    """Return the first examples in words: what is read, and what is learned."""
    blocks = []
    for number, e in enumerate(examples[:count], 1):
        title = f"example {number} (line {e.line}): {len(e)} tokens, {e.learned} learned"
        blocks.append("\n".join([title, *_parts(e, tokenizer)]))
    return "\n\n".join(blocks)


def _parts(example: Example, tokenizer: Tokenizer | None) -> list[str]:
    pairs = zip(example.ids.tolist(), example.labels.tolist(), strict=True)
    lines = []
    for learned, group in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        ids = [token for token, _ in group]
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=True)
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        lines.append(f"  {'learned' if learned else 'read   '} | {short!r}")
    return lines


__all__ = ["preview"]
