"""Steps in C++ give the bits that Python's trainer gives on the same library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.training.results import StepResult
from tests.cpp import nets
from tests.cpp.figures import digits
from tests.cpp.programs import driver, run

LAYOUTS = [
    ("mlp", "auto"),
    ("mlp", "separate"),
    ("mlp-sgd", "fused"),  # plain SGD is part of other products in the layout that auto picks
    ("cnn", "auto"),
    ("cnn", "separate"),
    ("transformer", "auto"),
    ("accumulated", "auto"),
    ("several", "auto"),  # a model of four steps besides that of one
    ("fp16", "auto"),
    ("web", "auto"),  # models for two kinds of runtime
]


def compare(tmp_path: Path, name: str, layout: str, steps: int, kind: str = "plain") -> None:
    program = driver(kind)
    folder = nets.artifacts(name, tmp_path / "artifacts")
    rows = nets.batches(name, tmp_path / "batches")
    environment = {"SEED": "5", "SEPARATE": str(int(layout == "separate"))}
    places = (folder, tmp_path / "batches", steps, tmp_path / "losses", tmp_path / "saved")
    run(program, "train", *places, env=environment)
    trainer = onnxtrain.Trainer(folder, seed=5, threads=1, layout=layout)
    losses = [trainer.step(**rows[i % len(rows)]).loss for i in range(steps)]
    trainer.flush()
    actual = np.fromfile(tmp_path / "losses", np.float32)
    np.testing.assert_array_equal(actual, np.array(losses, np.float32))
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    tensors, meta = load_checkpoint(tmp_path / "saved")
    expected = trainer.state_dict()
    assert tensors.keys() == expected.keys()
    for key, array in expected.items():
        assert tensors[key].tobytes() == array.tobytes(), key
    own = trainer.progress()
    assert meta == {key: own[key] for key in meta}
    assert meta.keys() == {"lr", "manifest", "properties", "seed", "step"}


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_steps(tmp_path: Path, name: str, layout: str) -> None:
    compare(tmp_path, name, layout, steps=60)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_thousand_steps(tmp_path: Path, name: str, layout: str) -> None:
    compare(tmp_path, name, layout, steps=1000)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_nothing_odd_for_the_sanitizers(tmp_path: Path, name: str, layout: str) -> None:
    compare(tmp_path, name, layout, steps=40, kind="sanitized")


def test_two_threads(tmp_path: Path) -> None:
    """A net whose products are large enough to be shared."""
    digits(tmp_path)
    folder, batches = tmp_path / "artifacts", tmp_path / "batches"
    places = (folder, batches, 20, tmp_path / "losses", tmp_path / "saved")
    run(driver(), "train", *places, env={"THREADS": "2"})
    batch = {key.removeprefix("0/"): array for key, array in load_checkpoint(batches)[0].items()}
    trainer = onnxtrain.Trainer(folder, threads=2, layout="fused")
    losses = [trainer.step(**batch).loss for _ in range(20)]
    np.testing.assert_array_equal(np.fromfile(tmp_path / "losses", np.float32), losses)
    tensors = load_checkpoint(tmp_path / "saved")[0]
    for key, array in trainer.state_dict().items():
        assert tensors[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("name", ["cnn", "accumulated"])
def test_reports(tmp_path: Path, name: str) -> None:
    """Loss, metrics and outputs of a step, and of evaluations before and after it."""
    folder = nets.artifacts(name, tmp_path / "artifacts")
    batch = nets.batches(name, tmp_path / "batches")[0]
    trainer = onnxtrain.Trainer(folder, seed=5, threads=1)

    def text(what: str, result: StepResult) -> list[str]:
        yes = int(result.updated)
        return [
            f"{what} loss {result.loss:.9g} step {result.step} updated {yes}",
            f"{what} metric accuracy {result.metrics['accuracy']:.9g}",
            f"{what} output logits {result.outputs['logits'].size}",
        ]

    lines = text("eval", trainer.evaluate_batch(**batch))
    lines += text("step", trainer.step(**batch))
    lines += text("eval", trainer.evaluate_batch(**batch))
    printed = run(driver(), "report", folder, tmp_path / "batches", env={"SEED": "5"})
    assert printed.splitlines() == lines


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step", "warmup"])
def test_schedules(name: str) -> None:
    base, total = 0.1, 7
    inner = onnxtrain.optim.schedules.Cosine(total)
    known = {
        "constant": onnxtrain.optim.schedules.Constant(),
        "linear": onnxtrain.optim.schedules.Linear(total),
        "cosine": inner,
        "step": onnxtrain.optim.schedules.Step(total),
        "warmup": onnxtrain.optim.schedules.Warmup(total, inner),
    }
    printed = run(driver(), "schedule", name, base, total, 20)
    expected = [known[name].lr(base, step) for step in range(1, 21)]
    assert [float(line) for line in printed.split()] == expected
