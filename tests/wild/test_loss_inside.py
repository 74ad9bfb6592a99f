"""Files that end in ArgMax or a similar choice: the loss uses the scores before it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import losses
from onnxtrain.errors import PrepareError
from tests.wild import graphs as g

BATCH = {"x": np.random.default_rng(2).standard_normal((6, 5)).astype(np.float32)}


def policy(**more: tuple[int, ...]) -> onnx.ModelProto:
    """A net of a game engine: numbers about itself, and the action that it takes."""
    return g.model(
        [
            g.node("Gemm", "x w1 b1", "a", transB=1),
            g.node("Tanh", "a", "h"),
            g.node("Gemm", "h w2 b2", "scores", transB=1),
            g.node("ArgMax", "scores", "action", axis=1),
            g.node("Identity", "version", "version_number"),
        ],
        {"x": (6, 5)},
        {"version_number": (1,), "action": (6, 1), **more},
        {
            "w1": g.random(8, 5),
            "b1": g.random(8),
            "w2": g.random(3, 8),
            "b2": g.random(3),
            "version": np.array([3], np.float32),
        },
        types={"action": g.INT64},
    )


def test_a_value_inside_trains_what_leads_to_it() -> None:
    loss = losses.LossTerm("cross_entropy", output="scores")
    made = onnxtrain.build(policy(), loss=loss, optimizer="adamw:lr=1e-2")
    assert g.trained(made) == {"w1", "b1", "w2", "b2"}
    trainer = onnxtrain.Trainer(made)
    labels = np.arange(6) % 3
    curve = [float(trainer.step(**BATCH, labels=labels).loss) for _ in range(20)]
    assert g.falls(curve)
    predicted = trainer.predict(**BATCH)
    assert predicted["action"].shape == (6, 1)


def test_the_refusal_names_that_value() -> None:
    with pytest.raises(PrepareError, match=r"LossTerm\('mse', output='scores'\)"):
        onnxtrain.build(policy(), loss="mse", optimizer="sgd")


def test_numbers_of_the_file_are_no_predictions() -> None:
    """The version number is a float output, and it is not what a loss looks at."""
    model = policy(scores=(6, 3))
    made = onnxtrain.build(model, loss="cross_entropy", optimizer="adamw:lr=1e-2")
    trainer = onnxtrain.Trainer(made)
    got = float(trainer.evaluate_batch(**BATCH, labels=np.zeros(6, np.int64)).loss)
    scores = g.run(model, BATCH)[2].astype(np.float64)
    want = np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[:, 0])
    assert got == pytest.approx(want, rel=1e-5)


def test_the_hint_names_an_output_that_is_computed() -> None:
    model = policy(scores=(6, 3), h=(6, 8))
    with pytest.raises(PrepareError, match=r"output='scores'"):
        onnxtrain.build(model, loss="mse", optimizer="sgd")
