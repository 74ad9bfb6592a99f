"""One trainer in two threads, and one directory in two runs."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxtrain.errors import BusyError, ShapeError, UncopiableError
from onnxtrain.training import Callback, Run, StepResult, Trainer
from tests.artifacts.models import data

from .made import made, same


class Meanwhile(Callback):
    """Do something in another thread during the second step."""

    def __init__(self, do) -> None:
        self.do, self.errors = do, list[BaseException]()

    def on_step(self, run: Run, result: StepResult) -> None:
        if result.step == 2:
            thread = threading.Thread(target=self._try, args=(run,))
            thread.start()
            thread.join()

    def _try(self, run: Run) -> None:
        try:
            self.do(run.trainer)
        except BusyError as error:
            self.errors.append(error)


@pytest.mark.parametrize(
    "do",
    [
        lambda t: t.step(*data(8)),
        lambda t: t.fit(data(8), progress=False),
        lambda t: t.predict(data(8)[0]),
        lambda t: t.evaluate(data(8)),
        lambda t: t.gradients(*data(8)),
        lambda t: t.load_state_dict(t.state_dict()),
    ],
)
def test_another_thread_gets_an_error(do) -> None:
    alone, watched, meanwhile = Trainer(made()), Trainer(made()), Meanwhile(do)
    alone.fit(data(32), batch_size=8, progress=False)
    watched.fit(data(32), batch_size=8, callbacks=[meanwhile], progress=False)
    (error,) = meanwhile.errors
    assert "another thread is using this trainer\nhint: create one trainer per thread" in str(error)
    same(alone.state_dict(), watched.state_dict())
    assert watched.global_step == 4


def test_threads_in_turn() -> None:
    trainer = Trainer(made())
    for _ in range(3):
        thread = threading.Thread(target=trainer.step, args=data(8))
        thread.start()
        thread.join()
    assert trainer.global_step == 3
    with pytest.raises(ShapeError):
        trainer.step(*data(8), 1)  # an error lets go of it
    trainer.step(*data(8))


def test_two_runs_of_one_process(tmp_path: Path) -> None:
    def again(_: Trainer) -> None:
        Trainer(made()).fit(data(8), directory=tmp_path / "." / "run", resume=True, progress=False)

    meanwhile = Meanwhile(again)
    trainer = Trainer(made())
    trainer.fit(
        data(32), batch_size=8, directory=tmp_path / "run", callbacks=[meanwhile], progress=False
    )
    (error,) = meanwhile.errors
    assert "run is locked by a run of this process" in str(error)
    again(trainer)


def hold(artifacts: str, directory: str) -> None:
    """Train until killed."""

    def wait(run: Run, record: dict) -> None:
        Path(directory, "started").touch()
        time.sleep(600)

    Trainer(artifacts).fit(data(8), directory=directory, callbacks=[wait], progress=False)


def test_two_processes(tmp_path: Path) -> None:
    made().save(tmp_path / "art")
    run = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold, args=(str(tmp_path / "art"), str(run)))
    process.start()
    while not (run / "started").exists():
        assert process.is_alive()
        time.sleep(0.1)
    trainer = Trainer(made())
    with pytest.raises(BusyError, match="run is locked by a run of another process"):
        trainer.fit(data(8), directory=run, resume=True, progress=False)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (run / ".lock").exists()
    assert trainer.fit(data(8), directory=run, resume=True, progress=False).losses


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("layout", ["fused", "separate", "auto"])
def test_a_trainer_is_not_copied(layout: str, copied: Callable[[Trainer], object]) -> None:
    trainer = Trainer(made(), layout=layout)
    with pytest.raises(UncopiableError, match=r"hint: pickle its artifacts"):
        copied(trainer)
    assert Trainer(pickle.loads(pickle.dumps(trainer.artifacts))).step(*data(8)).updated
