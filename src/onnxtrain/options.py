"""Names with options in one string, as a command line passes them.

>>> parse_options("cosine:warmup=10,total=100")
('cosine', {'warmup': 10, 'total': 100})
>>> parse_options("multi_step:milestones=[30,60],gamma=0.2")
('multi_step', {'milestones': [30, 60], 'gamma': 0.2})
>>> parse_options("mse")
('mse', {})
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from onnxtrain.errors import PrepareError

_WORDS = {"true": True, "false": False, "none": None}


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``"name:key=value,key=value"``.

    A value is a number, a list in brackets, true, false, none, or else a word.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    # Commas inside brackets belong to a list.
    parts = re.split(r",(?![^\[(]*[\])])", rest) if colon else []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise PrepareError(
                f"not an option: {part!r} in {text!r}\nhint: write name:key=value,key=value"
            )
        options[key.strip()] = _value(value.strip())
    return name.strip(), options


def make(kinds: Mapping[str, type], text: str, what: str, options: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass that ``text`` names; options in ``text`` come first.

    Args:
        kinds: dataclasses by name.
        text: a name, or a name with options.
        what: what the names stand for, for messages.
        options: more options, for those that ``text`` leaves open.
    """
    name, given = parse_options(text)
    kind = kinds.get(name.lower().replace("-", "_"))
    if kind is None:
        raise unknown(name, kinds, what)
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    wrong = [key for key in {**options, **given} if key not in known]
    if wrong:
        raise PrepareError(
            f"{name} has no option {', '.join(map(repr, wrong))}\n"
            f"hint: it has {', '.join(known) or 'none'}"
        )
    settings = {**options, **given}
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.init
        and f.name not in settings
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise PrepareError(
            f"{name} needs {', '.join(missing)}\n"
            f"hint: write {name}:{','.join(f'{m}=...' for m in missing)}"
        )
    return kind(**settings)


def unknown(name: str, choices: Iterable[str], what: str) -> PrepareError:
    """Return the error for a name that does not exist, with near matches."""
    known = list(choices)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(known)}"
    return PrepareError(f"no such {what}: {name!r}\nhint: {hint}")


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


__all__ = ["make", "parse_options", "unknown"]
