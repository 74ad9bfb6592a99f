"""The repr of artifacts, trainers and histories is short."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.losses import LossTerm
from onnxtrain.training import History, Trainer
from tests.artifacts.models import classifier


@pytest.fixture(scope="module")
def artifacts() -> Artifacts:
    return build(classifier(), loss=[LossTerm("cross_entropy", output="scores")], optimizer="adamw")


def is_short(thing: object) -> bool:
    lines = repr(thing).splitlines()
    return 3 <= len(lines) <= 9 and max(map(len, lines)) <= 100 and " at 0x" not in repr(thing)


def test_artifacts_and_trainer(artifacts: Artifacts) -> None:
    trainer = Trainer(artifacts)
    for thing in (artifacts, trainer):
        assert is_short(thing)
        assert ET.fromstring(thing._repr_html_()).tag == "table"
    assert "adamw" in repr(artifacts).lower()
    assert "step" in repr(trainer)


def test_history_of_many_steps_has_a_curve() -> None:
    losses = np.linspace(2, 0.1, 2000).tolist()
    steps = [{"step": i, "epoch": 0, "lr": 0.1, "loss": v} for i, v in enumerate(losses)]
    epoch = {"epoch": 0, "loss": 1.0, "val_loss": 0.9}
    history = History(steps, [epoch], "<b>ended</b>", epoch)
    assert is_short(history)
    assert "2000" in repr(history)
    page = ET.fromstring(f"<div>{history._repr_html_()}</div>")
    assert page.find("table") is not None
    assert page.find(".//b") is None, "text is escaped"
    line = page.find(".//{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    assert 2 <= len(line.attrib["points"].split()) <= 240


@pytest.mark.parametrize("losses", [[], [1.0], [float("nan")] * 3, [1.0, float("inf"), 1.0]])
def test_histories_without_a_curve(losses: list[float]) -> None:
    history = History([{"loss": v} for v in losses], [], "", None)
    assert repr(history).startswith("History")
    ET.fromstring(f"<div>{history._repr_html_()}</div>")
