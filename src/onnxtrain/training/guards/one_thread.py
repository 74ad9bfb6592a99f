"""One trainer serves one thread at a time, and there is one of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from onnxtrain.errors import BusyError, UncopiableError


class NotCopied:
    """Refuses to be pickled and copied: sessions and buffers cannot be."""

    def __reduce__(self) -> NoReturn:
        raise UncopiableError(
            "a trainer cannot be pickled or copied\n"
            "hint: pickle its artifacts, or save() here and load() in a trainer over there"
        )


class OneThread:
    """A region that one thread may be in, also several times over; others are refused."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread uses this trainer\n"
                "hint: a trainer of its own for each thread; they may share the artifacts"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class _Guarded(Protocol):
    in_use: OneThread


S = TypeVar("S", bound=_Guarded)
P = ParamSpec("P")
R = TypeVar("R")


def alone(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return a method that refuses to run while another thread runs one of the same object."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **named: P.kwargs) -> R:
        with self.in_use:
            return method(self, *args, **named)

    return call
