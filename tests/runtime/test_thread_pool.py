"""Tasks shared by threads: each runs once, and an error in any thread is raised."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime.thread_pool import SleepingPool, Task


class Recorder:
    """Stands for a session; knows who ran what."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad, self.ran = bad, []
        self.both = threading.Barrier(2, timeout=600)

    def run_with_iobinding(self, number: Any) -> None:
        if number < 2:
            self.both.wait()  # two threads are at work at the same time
        self.ran.append((number, threading.get_ident()))
        if number == self.bad:
            raise RuntimeError(f"piece {number}\nmore")


def pieces(session: Recorder, count: int) -> list[Task]:
    return [(session, i, ()) for i in range(count)]


def test_every_task_runs_once_on_two_threads() -> None:
    session = Recorder()
    crew = SleepingPool(2)
    for _ in range(3):
        crew.run(pieces(session, 7))
    assert sorted(n for n, _ in session.ran) == sorted([*range(7)] * 3)
    assert len({thread for _, thread in session.ran}) == 2


def test_one_thread_keeps_the_order_and_copies_after_each() -> None:
    session = Recorder()
    target, source = np.zeros(2), np.ones(2)
    SleepingPool(0).run([(session, 5, [(target, source)]), (session, 6, ())])
    assert [n for n, _ in session.ran] == [5, 6]
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_in_any_thread_is_raised(bad: int) -> None:
    with pytest.raises(OnnxTrainError, match=f"onnxruntime: piece {bad}$"):
        SleepingPool(2).run(pieces(Recorder(bad), 2))
