"""Hints in the words of the call that the user made: ``freeze`` in ``build``, else ``wrt``."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_FREEZES: contextvars.ContextVar[bool] = contextvars.ContextVar("freezes", default=False)


@contextlib.contextmanager
def with_freeze() -> Iterator[None]:
    """Let hints speak of ``freeze`` while a call runs that has this option, and no ``wrt``."""
    token = _FREEZES.set(True)
    try:
        yield
    finally:
        _FREEZES.reset(token)


def leave_out(what: str) -> str:
    """Return how the user leaves something out of what is differentiated."""
    return f"name {what} in `freeze`" if _FREEZES.get() else f"leave {what} out of `wrt`"


__all__ = ["leave_out", "with_freeze"]
