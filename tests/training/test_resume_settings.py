"""A resumed run keeps its options and stretches its schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.training import Callback, Run, StepResult, Trainer
from tests.artifacts.models import data

from .made import made, same


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, result: StepResult) -> None:
        if result.step == self.step:
            run.stop = "enough"


def fit(directory: Path, *args: object, rows: int = 64, **options: object):
    trainer = Trainer(made())
    progress = options.pop("progress", False)
    return trainer.fit(data(rows), *args, directory=directory, progress=progress, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "one_cycle", "polynomial"])
def test_a_schedule_is_stretched(tmp_path: Path, schedule: str) -> None:
    fit(tmp_path, epochs=2, batch_size=16, schedule=schedule, warmup=1)
    rest = fit(tmp_path, epochs=4, resume=True)
    whole = Trainer(made()).fit(
        data(64), epochs=4, batch_size=16, schedule=schedule, warmup=1, progress=False
    )
    assert [r["lr"] for r in rest.steps[8:]] == [r["lr"] for r in whole.steps[8:]]
    assert all(r["lr"] > 0 for r in rest.steps[8:])


def test_options_not_given_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"batch_size": 16, "schedule": "cosine", "patience": 9, "keep": 2, "shuffle": False}
    fit(tmp_path, epochs=2, lr=0.05, drop_last=True, checkpoint_every=3, **options)
    trainer = Trainer(made())
    history = trainer.fit(data(64), epochs=3, directory=tmp_path, resume=True, progress="plain")
    assert len(history.steps) == 12  # 4 an epoch: batches of 16
    assert trainer.lr == 0.05
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    line = capsys.readouterr().out.split("epoch 3/3")[0].replace("\n", " ")
    for part in (
        "resumed at step 8: batch_size 16, checkpoint_every 3, drop_last True, ",
        "keep 2, ",
        "patience 9, shuffle False, ",
        "lr 0.05, schedule cosine over 12 steps (before: 8), seed 0",
    ):
        assert part in line
    assert "epochs" not in line


def test_options_given_again_replace(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1, batch_size=16, lr=0.05, schedule="cosine", warmup=2)
    history = fit(
        tmp_path, epochs=3, batch_size=32, lr=0.5, schedule="constant", warmup=0, resume=True
    )
    assert [r["lr"] for r in history.steps[4:]] == [0.5] * 4
    fit(tmp_path, epochs=4, resume=True)


def test_an_interrupted_run_keeps_its_plan(tmp_path: Path) -> None:
    stopped = fit(tmp_path, epochs=3, batch_size=16, callbacks=[StopAt(5)])
    assert stopped.stopped == "enough"
    assert len(fit(tmp_path, resume=True).steps) == 12


def test_another_batch_size_from_the_next_epoch_on(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1, batch_size=16, schedule="cosine")
    rest = fit(tmp_path, epochs=3, batch_size=8, resume=True)
    assert len(rest.steps) == 4 + 2 * 8
    assert rest.steps[-1]["lr"] == pytest.approx(0.1 * (1 + np.cos(np.pi * 19 / 20)) / 2)


def test_another_batch_size_within_an_epoch(tmp_path: Path) -> None:
    fit(tmp_path, epochs=2, batch_size=8, callbacks=[StopAt(4)])
    with pytest.raises(OnnxTrainError, match=r"epoch 1 after 4 of .*: batch_size was 8, not 16"):
        fit(tmp_path, epochs=2, batch_size=16, resume=True)
    with pytest.raises(OnnxTrainError, match="batches per epoch was 8, not 4"):
        fit(tmp_path, epochs=2, rows=32, resume=True)
    assert len(fit(tmp_path, epochs=2, resume=True).steps) == 16


def test_a_schedule_that_has_ended(tmp_path: Path) -> None:
    fit(tmp_path, epochs=2, batch_size=16, schedule="cosine:total=4")
    trainer = Trainer(made())
    before = trainer.state_dict()
    with pytest.raises(OnnxTrainError, match="learning rate would be 0 from step 9 to the last"):
        trainer.fit(data(64), epochs=4, directory=tmp_path, resume=True, progress=False)
    same(before, trainer.state_dict())
    assert trainer.global_step == 0


def test_resume_without_validation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, epochs=1, batch_size=16, validation=data(16, seed=1))
    history = fit(tmp_path, epochs=3, resume=True, progress="plain")
    assert "without validation data" in capsys.readouterr().out.replace("\n", " ")
    assert history.best is not None
    assert history.best["epoch"] == 3  # by its own loss, not by comparison with a validation's


def test_a_run_that_cannot_be_restored_changes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1, batch_size=16)
    trainer = Trainer(made())
    trainer.load(tmp_path / "checkpoints" / "step-000000004.safetensors")
    trainer.save(tmp_path / "checkpoints" / "step-000000005.safetensors", {"run": {"epoch": "one"}})
    fresh = Trainer(made())
    before = fresh.state_dict()
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):
        fresh.fit(data(64), epochs=4, directory=tmp_path, resume=True, progress=False)
    same(before, fresh.state_dict())
