"""A disk that is full, read-only or not writable: the error names it, and nothing is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError, SaveError
from onnxtrain.training import Callback, Run, Trainer
from tests.artifacts.models import data

from .made import made


def refuse(number: int) -> Any:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def fit(folder: Path, epochs: int = 3, **options: Any) -> Trainer:
    trainer = Trainer(made())
    options |= {"progress": False, "tensorboard": False}
    trainer.fit(data(64), epochs=epochs, directory=folder, **options)
    return trainer


def test_full_disk_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curve cannot be drawn either, but that is not what went wrong."""

    class Fill(Callback):
        def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
            if run.epoch == 2:
                monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))

    with pytest.raises(SaveError, match=r"\.safetensors'?: cannot be written\n.*No space left"):
        fit(tmp_path, callbacks=[Fill()])
    monkeypatch.undo()
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [p.name for p in kept] == ["best.safetensors", "step-000000002.safetensors"]
    for path in kept:
        load_checkpoint(path)
    assert fit(tmp_path, resume=True).global_step == 6


def test_full_disk_while_metrics_are_written(tmp_path: Path) -> None:
    class Fill(Callback):
        def on_start(self, run: Run) -> None:
            assert run.records is not None
            run.records._jsonl.close()
            run.records._jsonl = open("/dev/full", "a")  # noqa: SIM115

    with pytest.raises(SaveError, match=r"metrics\.jsonl: cannot be written\n.*No space left"):
        fit(tmp_path, callbacks=[Fill()])


def test_full_disk_when_the_run_ends(tmp_path: Path) -> None:
    class Fill(Callback):
        def on_start(self, run: Run) -> None:
            assert run.records is not None
            run.rotation = None
            run.records._table.close()
            run.records._table = open("/dev/full", "a")  # noqa: SIM115

    with pytest.raises(SaveError, match=r"metrics\.csv: cannot be written\n.*No space left"):
        fit(tmp_path, epochs=1, callbacks=[Fill()])


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_directory_without_write_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "mkdir", refuse(number))
    with pytest.raises(SaveError, match=f"run: cannot be written\n.*{os.strerror(number)}"):
        fit(tmp_path / "run")
    monkeypatch.undo()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(os, "listdir", refuse(number))
    with pytest.raises(CheckpointError, match=f"cannot be read: {os.strerror(number)}"):
        fit(tmp_path / "run")


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(SaveError, match=r"run: cannot be written\n.*File exists"):
        fit(tmp_path / "run")


def test_cleanup_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(made())
    monkeypatch.setattr(os, "fsync", refuse(errno.EROFS))
    monkeypatch.setattr(os, "unlink", refuse(errno.EIO))
    with pytest.raises(SaveError, match="Read-only file system"):
        trainer.save(tmp_path / "c")


def test_long_names(tmp_path: Path) -> None:
    trainer = Trainer(made())
    path = tmp_path / ("n" * 255)
    trainer.save(path)
    trainer.load(path)
    with pytest.raises(SaveError, match=r"cannot be written\n.*File name too long"):
        trainer.save(tmp_path / ("n" * 256))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
