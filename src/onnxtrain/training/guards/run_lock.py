"""A directory serves one run at a time.

The lock is the operating system's: it ends with the process, so that a killed run blocks nobody.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxtrain.errors import BusyError
from onnxtrain.graph.io.atomic import named_refusal

_NAME = ".lock"
_mine: set[str] = set()
_guard = threading.Lock()


@contextmanager
def locked(directory: Path | None) -> Iterator[None]:
    """Keep a directory to this run; make it if it is not there.

    Raises:
        BusyError: if another run, of this process or another one, is going on in it.
    """
    if directory is None:
        yield
        return
    # Locks of a file are one process's: its own threads need a list besides.
    key = os.path.realpath(directory)
    with _guard:
        if key in _mine:
            raise _busy(directory, "this process")
        _mine.add(key)
    try:
        file = _opened(directory)
        try:
            if not _lock(file):
                raise _busy(directory, "another process")
            yield
        finally:
            os.close(file)
    finally:
        with _guard:
            _mine.discard(key)


def _opened(directory: Path) -> int:
    with named_refusal(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory / _NAME, os.O_RDWR | os.O_CREAT, 0o666)


def _lock(file: int) -> bool:
    """Take the lock of an open file; ``False`` if another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Not flock: children made by fork would keep it after the run has died.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _busy(directory: Path, who: str) -> BusyError:
    return BusyError(
        f"{directory}: a run of {who} is going on there\n"
        "hint: wait for its end, or choose another directory"
    )
