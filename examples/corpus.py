"""A synthetic text with learnable rules: agreement, relative clauses, recurring names.

Generated from the word lists below, so it needs no license and no download.
"""

from __future__ import annotations

import random

_NOUNS = (
    "river stone house garden teacher child farmer sailor horse dog bird tree boat letter song "
)
_NOUNS += (
    "lamp road hill king queen baker miller weaver clock window door bridge field winter storm"
)
_VERBS = (
    "see follow find carry watch call remember leave meet help paint build open close love fear"
)
_ADJECTIVES = "old young small tall quiet bright cold warm grey green broken golden empty distant"
_PLACES = (
    "near the harbour,in the valley,behind the mill,under the bridge,beyond the hills,at night"
)
_NAMES = "Anna Boris Clara David Emma Felix Greta Henry Ida Jonas Klara Leo"


class Generator:
    """Generates sentences from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._hero = "Anna"

    def _pick(self, words: str, separator: str = " ") -> str:
        items = words.split(separator)
        # A Pareto distribution: few words are common, most are rare.
        return items[min(int(self._random.paretovariate(0.8)) - 1, 10**6) % len(items)]

    def _noun_phrase(self, depth: int) -> tuple[str, bool]:
        """Return a phrase and whether it is plural."""
        if self._random.random() < 0.25:
            return self._hero, False
        plural = self._random.random() < 0.4
        words = ["the" if self._random.random() < 0.7 else ("some" if plural else "a")]
        if self._random.random() < 0.4:
            words.append(self._pick(_ADJECTIVES))
        words.append(self._pick(_NOUNS) + ("s" if plural else ""))
        if depth and self._random.random() < 0.3:
            thing, many = self._noun_phrase(0)
            words += ["that", thing, self._verb(many)]
        return " ".join(words), plural

    def _verb(self, plural: bool) -> str:
        verb = self._pick(_VERBS)
        return verb if plural else (verb + "es" if verb.endswith("ch") else verb + "s")

    def sentence(self) -> str:
        """Return a sentence; consecutive sentences often have the same subject."""
        if self._random.random() < 0.2:
            self._hero = self._pick(_NAMES)
        subject, plural = self._noun_phrase(1)
        words = [subject, self._verb(plural), self._noun_phrase(1)[0]]
        if self._random.random() < 0.4:
            words.append(self._pick(_PLACES, ","))
        if self._random.random() < 0.3:
            other, many = self._noun_phrase(0)
            words += [", and", other, self._verb(many), self._noun_phrase(0)[0]]
        return " ".join(words) + " ."


def text(seed: int, sentences: int) -> str:
    """Return a text, one sentence per line."""
    generator = Generator(seed)
    return "\n".join(generator.sentence() for _ in range(sentences)) + "\n"
