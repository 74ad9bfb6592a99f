"""Denormal numbers count as zero inside a run, and as themselves everywhere else.

Vanishing gradients would run at a tenth of the speed otherwise. onnxruntime switches the mode on in
the thread that creates the first session and leaves it on; here it is switched around each run, so
that the caller's own arithmetic is not touched and a run in another thread computes the same.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_SIZE = 256  # bytes: more than a floating-point environment takes on any platform


# Not ctypes.util.find_library: it starts ldconfig or a compiler. None is the program itself, which
# has the functions where the C library does.
_NAMES = {"linux": ("libm.so.6", None), "win32": ("ucrtbase",)}


def _library() -> Any:
    for name in _NAMES.get(sys.platform, (None,)):
        try:
            library = ctypes.CDLL(name)
            for function in (library.fegetenv, library.fesetenv):
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
        except (OSError, AttributeError, TypeError):
            continue
        return library
    return None  # the mode then stays on, which is what onnxruntime does by itself


_LIBRARY = _library()
_TINY, _TWO = np.full(1, 1e-40, np.float32), np.float32(2)
_local = threading.local()


def _environment() -> ctypes.Array[ctypes.c_char] | None:
    if _LIBRARY is None:
        return None
    buffer = ctypes.create_string_buffer(_SIZE)
    return None if _LIBRARY.fegetenv(buffer) else buffer


def _known_mode() -> ctypes.Array[ctypes.c_char] | None:
    """Return the mode where its bits are known; elsewhere the first session has to show it.

    A session that the caller made before ours may have left nothing to be seen.
    """
    buffer = _environment() if sys.platform == "linux" else None
    place, bits = _BITS.get(platform.machine(), (0, 0))
    if buffer is None or not bits:
        return None
    word = int.from_bytes(buffer.raw[place : place + 4], sys.byteorder) | bits
    ctypes.memmove(ctypes.addressof(buffer) + place, word.to_bytes(4, sys.byteorder), 4)
    return buffer


# Where the control word lies in glibc's fenv_t, and its bits: FTZ and DAZ of MXCSR, FZ of FPCR.
_BITS = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}
_fast: ctypes.Array[ctypes.c_char] | None = _known_mode()


@contextmanager
def learning_mode() -> Iterator[None]:
    """Remember the mode that a session puts its thread into, then put back the caller's."""
    global _fast
    before = _environment()
    try:
        yield
    finally:
        if before is not None:
            after = _environment()
            # Only the first session of a process switches the mode on: later ones show nothing.
            # Other bits change too, as those that remember a rounding; they are no mode.
            if _fast is None and after is not None and _flushes():
                _fast = after
            _LIBRARY.fesetenv(before)


def _flushes() -> bool:
    """Return whether this thread takes denormals for zero now."""
    return not (_TINY * _TWO).any()


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
