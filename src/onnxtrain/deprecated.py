"""Old names that still work: each is looked up where it is now, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def aliases(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that knows old names.

    Args:
        module: the module that had the names.
        names: the old name to the full path of the new one.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        warnings.warn(
            f"{module}.{name} is called {names[name]} now", DeprecationWarning, stacklevel=2
        )
        return getattr(importlib.import_module(home), new)

    return find


__all__ = ["aliases"]
