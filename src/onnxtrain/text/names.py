"""The names that builders of language models give to inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable

IDS = "input_ids"
EMBEDDED = "inputs_embeds"
MASK = "attention_mask"
POSITIONS = "position_ids"
TYPES = "token_type_ids"
LABELS = "labels"

_PAST = re.compile(r"past[_.]|past_key|cache\.")
_PRESENT = re.compile(r"present[_.]|present_key|past_key_values\.\d+\..*_out")

SWITCHES: dict[str, int | bool] = {
    "use_cache_branch": False,
    "num_logits_to_keep": 0,
    "logits_to_keep": 0,
}
"""Inputs that are settings, and the value under which a whole sequence is computed at once."""


def is_past(name: str | None) -> bool:
    """Return whether an input holds keys or values of earlier tokens.

    >>> is_past("past_key_values.0.key"), is_past("input_ids")
    (True, False)
    """
    return bool(_PAST.match(name or ""))


def is_present(name: str | None) -> bool:
    """Return whether an output holds keys or values for the tokens to come.

    >>> is_present("present.0.value"), is_present("logits")
    (True, False)
    """
    return bool(_PRESENT.match(name or ""))


def past_of(present: str, past: Iterable[str]) -> str | None:
    """Return the input that an output is fed to when generation goes on.

    >>> past_of("present.0.key", ["past_key_values.0.key", "past_key_values.0.value"])
    'past_key_values.0.key'
    """
    wanted = _parts(present)
    return next((name for name in past if _parts(name) == wanted), None)


def _parts(name: str) -> tuple[str, ...]:
    """Return the layer and what it is of: ``("0", "key")``."""
    words = re.split(r"[._]", name)
    numbers = [w for w in words if w.isdigit()]
    kinds = [w for w in words if w in ("key", "value", "decoder", "encoder", "self", "cross")]
    kinds = kinds if kinds[:1] != ["key"] or "values" not in words else kinds[1:]
    return *numbers, *kinds
