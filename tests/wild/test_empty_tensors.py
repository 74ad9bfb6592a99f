"""Tensors without elements: adapters of rank 0, empty defaults. All other tensors train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from tests.wild import graphs as g

X = np.random.default_rng(9).standard_normal((3, 4)).astype(np.float32)


def _model() -> onnx.ModelProto:
    """A layer with an adapter of rank 0 beside it."""
    return g.model(
        [
            g.node("MatMul", "x w", "h"),
            g.node("MatMul", "x down", "a"),
            g.node("MatMul", "a up", "b"),
            g.node("Add", "h b", "y"),
        ],
        {"x": (3, 4)},
        {"y": (3, 2)},
        {
            "w": g.random(4, 2),
            "down": np.zeros((4, 0), np.float32),
            "up": np.zeros((0, 2), np.float32),
        },
    )


@pytest.mark.parametrize("train", [None, ["*"], ["w", "down", "up"]])
@pytest.mark.parametrize("optimizer", ["adamw:lr=1e-2", "sgd:lr=0.1"])
def test_the_others_train(optimizer: str, train: list[str] | None, tmp_path: Path) -> None:
    model = _model()
    made = onnxtrain.build(model, loss="mse", optimizer=optimizer, train=train)
    assert g.trained(made) == {"w"}
    trainer = onnxtrain.Trainer(made)
    target = np.zeros((3, 2), np.float32)
    curve = [float(trainer.step(x=X, target=target).loss) for _ in range(5)]
    assert g.falls(curve)
    trainer.export(tmp_path / "trained.onnx")
    (after,) = g.run(onnx.load(tmp_path / "trained.onnx"), {"x": X})
    np.testing.assert_allclose(after, trainer.predict(x=X)["y"], rtol=1e-6)
    assert np.abs(after - g.run(model, {"x": X})[0]).max() > 1e-3


def test_the_reason_is_told() -> None:
    explained = onnxtrain.explain(_model())
    assert set(explained.parameters) == {"w"}
    assert "down: an empty tensor" in str(explained)


def test_nothing_else_to_train() -> None:
    with pytest.raises(PrepareError, match="no parameter is left"):
        onnxtrain.build(_model(), loss="mse", optimizer="sgd", train=["up"])
