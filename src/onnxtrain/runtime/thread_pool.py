"""A thread pool for many small runs of sessions, whose threads sleep between calls."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onnxtrain.runtime import session as runtime

Task = tuple[Any, Any, runtime.Copies]
"""A single-threaded session, its binding, and the copies after a run."""


class SleepingPool:
    """The caller's thread and helper threads that sleep while they wait.

    onnxruntime's own pools spin while they wait, so two of them slow each other down.

    Args:
        threads: number of threads including the caller's.
    """

    def __init__(self, threads: int) -> None:
        self.helpers = max(threads - 1, 0)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks in any order; raise the first error after all threads are done."""
        if not self.helpers:
            runtime.run_each(tasks)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.helpers, "onnxtrain-update")
        # Each thread pops its next task when it is free: cores are rarely equally fast.
        waiting = collections.deque(tasks)
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
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pop_all(waiting: collections.deque[Task]) -> Iterator[Task]:
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        yield task
