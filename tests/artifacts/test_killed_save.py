"""Saving over old artifacts, killed or failing at each file operation."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import CheckpointError, SaveError

from .models import example, with_norm

OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir", "listdir")


class Killed(BaseException):
    """The process was killed: later file operations have no effect."""


class Countdown:
    """Raises at the n-th file operation, and if killed, at every later one."""

    def __init__(self, patch: pytest.MonkeyPatch, n: int, error: BaseException) -> None:
        self.left, self.error = n, error
        for name in OPERATIONS:
            patch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.left < 0 and isinstance(self.error, Killed)):
                raise self.error
            return function(*args, **kwargs)

        return call


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def old() -> Artifacts:
    """Artifacts with shared weights and a trained value."""
    artifacts = example()
    artifacts.values["fc2.bias"] = artifacts.values["fc2.bias"] + 1
    return artifacts


@pytest.fixture(scope="module", params=["same model", "other model"])
def new(request: pytest.FixtureRequest) -> Artifacts:
    if request.param == "same model":
        return example()
    return build(with_norm(), loss="mse", optimizer="sgd")


def is_whole(folder: Path, old: Artifacts, new: Artifacts) -> Artifacts:
    """Return which of the two the directory has."""
    values = Artifacts.load(folder).values
    for artifacts in (old, new):
        if values.keys() == artifacts.values.keys() and all(
            np.array_equal(values[n], a) for n, a in artifacts.values.items()
        ):
            return artifacts
    raise AssertionError("a mixture")


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_old_or_new(
    old: Artifacts,
    new: Artifacts,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new.save(tmp_path / "fresh")
    old.save(tmp_path / "start")
    (tmp_path / "start" / "notes.txt").write_text("the user's own")
    fresh = {**content(tmp_path / "fresh"), "notes.txt": b"the user's own"}
    before, folder = content(tmp_path / "start"), tmp_path / "art"
    outcomes = []
    for n in range(1, 500):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "start", folder)
        with monkeypatch.context() as patch:
            countdown = Countdown(patch, n, error)
            with suppress(Killed, SaveError):
                new.save(folder)
            over = countdown.left > 0
        outcomes.append(is_whole(folder, old, new) is new)
        if not outcomes[-1] and isinstance(error, OSError):
            assert content(folder) == before
        if n % 5 == 0:
            new.save(folder)
            # A file that could not be removed is not tried again, a killed removal is.
            assert fresh.items() <= content(folder).items(), n
            assert isinstance(error, OSError) or content(folder) == fresh, n
        if over:
            break
    if isinstance(error, Killed):
        assert outcomes == sorted(outcomes), "once the new ones are there, they stay"
    assert len(outcomes) > 40
    assert outcomes.count(False) > 10


def test_killed_twice(
    old: Artifacts, new: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving again over the staging files of a killed save is also atomic."""
    new.save(tmp_path / "start")
    manifest = (tmp_path / "start" / "manifest.json").read_bytes()
    for n in range(1, 500):
        with monkeypatch.context() as patch:
            Countdown(patch, n, Killed())
            with pytest.raises(Killed):
                old.save(tmp_path / "start")
        if (tmp_path / "start" / "manifest.json").read_bytes() != manifest:
            break
    assert is_whole(tmp_path / "start", new, old) is old
    folder = tmp_path / "art"
    for n in range(1, 500, 3):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "start", folder)
        with monkeypatch.context() as patch:
            countdown = Countdown(patch, n, Killed())
            with suppress(Killed, CheckpointError):
                Artifacts.load(folder).save(folder)
            over = countdown.left > 0
        assert is_whole(folder, new, old) is old
        if over:
            break
    loaded = Artifacts.load(folder)
    loaded.save(folder)
    assert Path(str(loaded.source("infer"))).is_file()


def test_first_save_is_whole_or_not_there(
    new: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new.save(tmp_path / "fresh")
    for n in range(1, 500, 2):
        folder = tmp_path / f"art{n}"
        with monkeypatch.context() as patch:
            countdown = Countdown(patch, n, Killed())
            with suppress(Killed):
                new.save(folder)
        if (folder / "manifest.json").exists():
            Artifacts.load(folder)
        new.save(folder)
        assert content(folder) == content(tmp_path / "fresh")
        if countdown.left > 0:
            break
