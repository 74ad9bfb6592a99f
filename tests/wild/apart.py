"""Run each file in its own process, which has a time limit and may crash.

The processes are forks of one that has imported the dependencies: importing takes longer than
checking most files.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.wild.judge import Row, judge

LIMIT = 1800
"""Seconds of the processor: a busy machine may take longer."""
LONGEST = 3600
"""Seconds of the clock."""
Judge = Callable[[Path, str], Row]


def apart(label: str, path: Path, judged: Judge = judge, limit: int = LIMIT) -> Row:
    """Return the row that a process of its own gives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.wild.judge"])
    answer, given = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(given, judged, path, label, limit))
    process.start()
    given.close()
    try:
        if answer.poll(LONGEST):
            return answer.recv()
        return Row(label, "time limit", seconds=LONGEST)
    except EOFError:  # it ended without an answer
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return Row(label, "time limit", seconds=limit)
        return Row(label, "crash", message=f"exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(given: Connection, judged: Judge, path: Path, label: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    given.send(judged(path, label))
