"""The learning rate finder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model


def trainer(optimizer: str = "sgd:lr=0.5", **options: object) -> onnxtrain.Trainer:
    artifacts = onnxtrain.build(
        digits_model(hidden=16), loss="cross_entropy", optimizer=optimizer, **options
    )
    return onnxtrain.Trainer(artifacts)


def test_the_suggestion_trains_better_than_extremes() -> None:
    data = digits_data(320)
    lr = onnxtrain.find_lr(trainer(), data, highest=1e3).suggestion

    def last(rate: float) -> float:
        return trainer().fit(data, epochs=12, lr=rate, progress=False).epochs[-1]["loss"]

    assert last(lr) < 0.5 * last(lr / 1000)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_trainer_is_restored(optimizer: str, options: dict[str, object]) -> None:
    data = digits_data(64)
    one, other = trainer(optimizer, **options), trainer(optimizer, **options)
    curve = onnxtrain.find_lr(one, data, steps=7)
    assert len(curve.lrs) == len(curve.losses) == len(curve.smoothed) == 7
    assert (one.global_step, one.lr) == (other.global_step, other.lr)
    for _ in range(2):
        assert one.step(**data).loss == other.step(**data).loss
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value, other.state_dict()[name])


def test_it_stops_when_the_loss_diverges() -> None:
    curve = onnxtrain.find_lr(trainer("sgd"), digits_data(320), highest=1e6)
    assert len(curve.lrs) < 100
    assert np.isfinite(curve.losses).all()
    assert curve.suggestion < 10
    assert "suggestion" in repr(curve)


def test_invalid_arguments() -> None:
    data = digits_data(32)
    one = trainer()
    for options in ({"lowest": 1.0, "highest": 0.1}, {"lowest": 0.0}, {"steps": 2}):
        with pytest.raises(OnnxTrainError, match="must"):
            onnxtrain.find_lr(one, data, **options)
    with pytest.raises(OnnxTrainError, match="not finite after 0 steps"):
        onnxtrain.find_lr(one, {**data, "image": data["image"] * np.nan})
    waiting = trainer(accumulate=2)
    waiting.step(**data)
    with pytest.raises(OnnxTrainError, match="flush"):
        onnxtrain.find_lr(waiting, data)


@pytest.mark.parametrize("name", ["lr.png", "lr.svg"])
def test_the_plot(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    onnxtrain.find_lr(trainer(), digits_data(32), steps=5).save(tmp_path / name)
    start = (tmp_path / name).read_bytes()[:5]
    assert start in (b"\x89PNG\r", b"<?xml")
