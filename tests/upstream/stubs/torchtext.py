"""Stands in for torchtext's legacy ``Field`` and WikiText-2, read from the working directory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import torch


def get_tokenizer(name: str) -> Callable[[str], list[str]]:
    """Return a tokenizer that separates punctuation."""
    assert name == "basic_english"
    return lambda line: re.findall(r"<\w+>|\w+|[^\w\s]", line.lower())


class Field:
    """Tokens of a text, and their indices in a vocabulary."""

    def __init__(
        self, tokenize: Callable[[str], list[str]], init_token: str, eos_token: str, lower: bool
    ) -> None:
        assert lower
        self.tokenize, self.special = tokenize, ["<unk>", "<pad>", init_token, eos_token]
        self.vocab = SimpleNamespace(stoi={})

    def build_vocab(self, dataset: SimpleNamespace) -> None:
        """Number the tokens, the most frequent first."""
        counts = Counter(dataset.examples[0].text)
        words = sorted(set(counts) - set(self.special), key=lambda w: (-counts[w], w))
        self.vocab.stoi = {word: i for i, word in enumerate([*self.special, *words])}

    def numericalize(self, texts: Iterable[list[str]]) -> torch.Tensor:
        """Return indices, one column for each text."""
        known = self.vocab.stoi
        columns = [torch.tensor([known.get(w, 0) for w in text]) for text in texts]
        return torch.stack(columns, dim=1)


def _splits(field: Field) -> tuple[SimpleNamespace, ...]:
    parts = []
    for name in ("train", "valid", "test"):
        lines = Path(f"wiki.{name}.tokens").read_text().splitlines()
        text = [token for line in lines for token in (*field.tokenize(line), "<eos>")]
        parts.append(SimpleNamespace(examples=[SimpleNamespace(text=text)]))
    return tuple(parts)


data = SimpleNamespace(Field=Field)
datasets = SimpleNamespace(WikiText2=SimpleNamespace(splits=_splits))
