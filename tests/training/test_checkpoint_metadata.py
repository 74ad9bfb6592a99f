"""Metadata of a checkpoint: it is checked first, and nothing changes if it is invalid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onnxtrain.checkpoint import load_checkpoint, save_checkpoint
from onnxtrain.errors import CheckpointError, OnnxTrainError, PrepareError
from onnxtrain.training import Trainer
from tests.artifacts.models import data

from .made import made, same


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "abc"),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", -0.1),
        ("lr", None),
        ("lr", True),
        ("lr", 1e39),
        ("step", math.nan),
        ("step", -5),
        ("step", 1.5),
        ("step", 1 << 31),
        ("seed", None),
        ("seed", -5),
        ("seed", 1 << 40),
        ("properties", 5),
        ("properties", {"a": [1]}),
    ],
)
def test_invalid_metadata(tmp_path: Path, name: str, value: object) -> None:
    trainer = Trainer(made())
    trainer.step(*data(8))
    trainer.save(tmp_path / "c")
    tensors, meta = load_checkpoint(tmp_path / "c")
    save_checkpoint(tmp_path / "c", tensors, {**meta, name: value})
    fresh = Trainer(made())
    before, progress = fresh.state_dict(), fresh.progress()
    with pytest.raises(CheckpointError, match=f"'{tmp_path}/c': invalid metadata:\n  '{name}'"):
        fresh.load(tmp_path / "c")
    same(before, fresh.state_dict())
    assert fresh.progress() == progress


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "0.1", None, True])
def test_invalid_learning_rates(value: object) -> None:
    trainer = Trainer(made())
    with pytest.raises(OnnxTrainError, match="lr must be finite and not negative"):
        trainer.lr = value  # type: ignore[assignment]
    assert trainer.lr == 0.1
    with pytest.raises(OnnxTrainError, match="lr must be finite and not negative"):
        trainer.fit(data(8), lr=float("nan"), progress=False)


@pytest.mark.parametrize("lr", [math.inf, math.nan, -1.0])
def test_build_with_an_invalid_learning_rate(lr: float) -> None:
    with pytest.raises(PrepareError, match="lr"):
        made(optimizer=f"adamw:lr={lr}")
