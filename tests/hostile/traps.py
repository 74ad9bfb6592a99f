"""A directory with targets for hostile models, and a watch on the directory outside it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np

SECRET = 1234.5
LOCATIONS = (
    "data.bin",
    "link.bin",
    "hard.bin",
    "pipe",
    "folder",
    "folder/../data.bin",
    "../outside/secret.bin",
    "@/secret.bin",
    "linked/secret.bin",
    "/dev/zero",
    "missing.bin",
    "model.onnx",
    "",
    "data.bin\0",
)
"""Locations for external data; ``@`` is replaced by the directory outside."""

_OPENED = (
    0x20 | 0x1 | 0x2 | 0x100 | 0x200 | 0x40 | 0x80
)  # open, access, modify, create, delete, move


class Traps:
    """Directory ``inside`` for the cases, and ``outside`` with a file that must not be opened."""

    def __init__(self, root: Path) -> None:
        self.inside, self.outside = root / "inside", root / "outside"
        for folder in (self.inside, self.outside, self.inside / "folder"):
            folder.mkdir()
        secret = self.outside / "secret.bin"
        secret.write_bytes(np.full(512, SECRET, np.float32).tobytes())
        (self.inside / "data.bin").write_bytes(np.ones(512, np.float32).tobytes())
        (self.inside / "link.bin").symlink_to(secret)
        (self.inside / "linked").symlink_to(self.outside)
        os.link(secret, self.inside / "hard.bin")
        os.mkfifo(self.inside / "pipe")
        self._watch = _Watch(self.outside, secret)

    def touched(self) -> bool:
        """Return whether anything outside was opened or changed since the last call."""
        return self._watch.read()


class _Watch:
    """An inotify watch, which also sees files opened by C++ libraries; Linux only."""

    def __init__(self, *paths: Path) -> None:
        self._file = -1
        if sys.platform != "linux":
            return
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in paths:
            if libc.inotify_add_watch(self._file, os.fsencode(path), _OPENED) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def read(self) -> bool:
        if self._file < 0:
            return False
        try:
            return bool(os.read(self._file, 1 << 16))
        except BlockingIOError:
            return False


__all__ = ["LOCATIONS", "SECRET", "Traps"]
