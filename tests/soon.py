"""Time limits that hold on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

_TRIES = 3


def is_soon(work: Callable[[], object], seconds: float = 1.0) -> bool:
    """Return whether work takes less of this process's own time, in the best of a few tries.

    The clock would also count what other processes do, and even a process's own time grows where
    they take its caches.
    """
    for _ in range(_TRIES):
        start = time.process_time()
        work()
        if time.process_time() - start < seconds:
            return True
    return False
