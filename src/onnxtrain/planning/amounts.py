"""Amounts as people write them: ``2GB`` of memory, ``4x512`` tokens."""

from __future__ import annotations

import re

from onnxtrain.errors import PrepareError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+)\s*[x\*]\s*(\d+)", re.IGNORECASE)


def read_memory(text: str | int) -> int:
    """Return bytes of ``2GB``, ``512 MiB`` or a number of bytes.

    >>> read_memory("2GB"), read_memory("1.5 GiB"), read_memory(7)
    (2000000000, 1610612736, 7)
    """
    if isinstance(text, int):
        return text
    match = _MEMORY.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise PrepareError(f"not an amount of memory: {text!r}\nhint: 2GB, 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def read_tokens(text: str) -> tuple[int, int]:
    """Return sequences and their length of ``4x512``.

    >>> read_tokens("4x512")
    (4, 512)
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None or "0" in match.groups():
        raise PrepareError(f"not a number of tokens: {text!r}\nhint: 4x512: 4 sequences of 512")
    return int(match[1]), int(match[2])


def amount(count: float) -> str:
    """Return bytes in words.

    >>> amount(2_345_000_000), amount(12_000)
    ('2.35 GB', '12 kB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
