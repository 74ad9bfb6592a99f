"""Many small runs shared by several threads, each of which runs one at a time."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onnxtrain.runtime import session as runtime

Task = tuple[Any, Any, runtime.Copies]
"""A session of one thread, what is bound to it, and what to copy after it ran."""


class SleepingPool:
    """The caller's thread and others that wait asleep.

    onnxruntime's own pools spin on their cores while they wait, and would slow each other down.

    Args:
        threads: in all; up to one means the caller's alone.
    """

    def __init__(self, threads: int) -> None:
        self.helpers = max(threads - 1, 0)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, pieces: Sequence[Task]) -> None:
        """Run all pieces, in any order; the first error is raised after all threads are done."""
        if not self.helpers:
            runtime.run_each(pieces)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.helpers, "onnxtrain-update")
        # Whoever is free takes the next one: cores are rarely equally fast.
        waiting = collections.deque(pieces)
        others = [
            self._pool.submit(runtime.run_each, _pop_all(waiting)) for _ in range(self.helpers)
        ]
        try:
            runtime.run_each(_pop_all(waiting))
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pop_all(waiting: collections.deque[Task]) -> Iterator[Task]:
    while True:
        try:
            piece = waiting.popleft()
        except IndexError:
            return
        yield piece
