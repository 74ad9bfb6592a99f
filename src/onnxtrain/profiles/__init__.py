"""What runtimes support, as probed: one JSON file per runtime, written by ``onnxtrain probe``.

The single source for two questions: which nodes ``onnxtrain.lower`` has to replace (by
:class:`onnxtrain.lowering.profile.Profile`), and what the targets of ``build`` lack
(:func:`missing`, in :mod:`onnxtrain.targets`). docs/lowering.md describes the format.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

_FOLDER = resources.files("onnxtrain.profiles")


@functools.cache
def names() -> list[str]:
    """Return the names of the profiles, sorted."""
    files = (f.name for f in _FOLDER.iterdir())
    return sorted(f.removesuffix(".json") for f in files if f.endswith(".json"))


def read(name: str) -> dict[str, Any]:
    """Return the content of a profile."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def covers(since: Iterable[Any], version: int) -> bool:
    """Return whether versions, or ranges of versions, include one."""
    for one in since:
        if isinstance(one, int):
            if one == version:
                return True
        elif one[0] <= version <= (one[0] if one[1] is None else one[1]):
            return True
    return False


def missing(profile: str, capabilities: Iterable[str]) -> frozenset[str]:
    """Return the capabilities that a runtime lacks according to its profile.

    A capability is ``"Op"``, ``"Op.opset22"`` (a kernel of that version), ``"Op.bfloat16"`` (of an
    element type) or ``"Op.attribute"`` (with that attribute set to 1). What a profile says nothing
    about counts as present: other capabilities, and operators of other domains.
    """
    ops = read(profile)["ops"]
    return frozenset(c for c in capabilities if _is_missing(ops, c))


def _is_missing(ops: dict[str, Any], capability: str) -> bool:
    operator, _, part = capability.partition(".")
    if not operator[0].isupper() or operator in _OTHER_DOMAINS:
        return False
    if operator not in ops:
        return True
    entry = ops[operator]
    if part.startswith("opset"):
        return not covers(entry["since"], int(part.removeprefix("opset")))
    if part in _TYPES:
        return part not in entry.get("dtypes", [part])
    return 1 not in entry.get("attrs", {}).get(part, [1])


_OTHER_DOMAINS = frozenset({"MatMulNBits"})  # of com.microsoft, which is not probed
_TYPES = frozenset({"bfloat16", "bool", "int64"})
