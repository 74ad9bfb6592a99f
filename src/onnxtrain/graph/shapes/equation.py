"""Equations of Einsum, expanded."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation without ellipsis and with an explicit output; each letter is an axis."""

    terms: tuple[str, ...]
    output: str
    ellipsis: str
    """Letters that stand for the axes of the ellipsis, which broadcast."""


LETTERS = string.ascii_lowercase + string.ascii_uppercase


def spare_letters(*texts: str) -> list[str]:
    """Return the letters that do not occur in the texts."""
    used = set("".join(texts))
    return [c for c in LETTERS if c not in used]


def expand_equation(equation: str, ranks: Sequence[int]) -> Equation | None:
    """Expand an equation: no spaces, no ellipsis, an explicit output.

    ``None`` if it does not fit operands of these ranks.

    >>> expand_equation("...ij, j", [3, 1])
    Equation(terms=('aij', 'j'), output='ai', ellipsis='a')
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        return None
    letters = [t.replace("...", "") for t in terms]
    extra = [rank - len(t) for rank, t in zip(ranks, letters, strict=True)]
    if any(e < 0 or (e and "..." not in t) for e, t in zip(extra, terms, strict=True)):
        return None
    if not arrow:
        joined = "".join(letters)
        right = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
        right = "..." + right if "..." in left else right
    width, spare = max(extra), spare_letters(text)
    if width > len(spare):
        return None
    shared = "".join(spare[:width])
    output = right.replace("...", shared)
    if len(set(output)) != len(output) or not set(output) <= {*"".join(letters), *shared}:
        return None
    expanded = (t.replace("...", shared[width - e :]) for t, e in zip(terms, extra, strict=True))
    return Equation(tuple(expanded), output, shared)
