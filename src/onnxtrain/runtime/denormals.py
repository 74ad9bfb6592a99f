"""Denormal numbers count as zero inside a run, and as themselves everywhere else.

Vanishing gradients would run at a tenth of the speed otherwise. onnxruntime switches the mode on in
the thread that creates a session and leaves it on; here it is switched around each run, so that the
caller's own arithmetic is not touched and a run in another thread computes the same numbers.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIZE = 256  # bytes: more than a floating-point environment takes on any platform


def _library() -> Any:
    try:
        name = "ucrtbase" if sys.platform == "win32" else ctypes.util.find_library("m")
        library = ctypes.CDLL(name)
        for function in (library.fegetenv, library.fesetenv):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    except (OSError, AttributeError, TypeError):
        return None  # the mode then stays on, which is what onnxruntime does by itself
    return library


_LIBRARY = _library()
_local = threading.local()
_fast: ctypes.Array[ctypes.c_char] | None = None


def _environment() -> ctypes.Array[ctypes.c_char] | None:
    if _LIBRARY is None:
        return None
    buffer = ctypes.create_string_buffer(_SIZE)
    return None if _LIBRARY.fegetenv(buffer) else buffer


@contextmanager
def learning_mode() -> Iterator[None]:
    """Remember the mode that a session puts its thread into, then put back the caller's."""
    global _fast
    before = _environment()
    try:
        yield
    finally:
        if before is not None:
            _fast = _environment()
            _LIBRARY.fesetenv(before)


class FlushDenormals:
    """A context in which this thread takes denormals for zero, once a session has shown how."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = None
        if _fast is not None:
            # One buffer per thread: making one takes longer than all the rest.
            if not hasattr(_local, "before"):
                _local.before = ctypes.create_string_buffer(_SIZE)
            self._before = _local.before
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_fast)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _LIBRARY.fesetenv(self._before)
