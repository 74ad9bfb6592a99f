"""Labels that are not classes: the error names the array, the row and the classes."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from onnxtrain import losses
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import LabelError
from onnxtrain.training import Trainer
from tests.artifacts.models import data

from .made import made, same


@functools.cache
def with_loss(name: str) -> Artifacts:
    """Return artifacts with one loss; trainers copy their state from them."""
    return made(loss=[losses.LossTerm(name, output="scores")], metrics=["grad_norm"])


@pytest.mark.parametrize("name", ["cross_entropy", "nll", "multi_margin"])
@pytest.mark.parametrize("layout", ["auto", "fused", "separate"])
@pytest.mark.parametrize("label", [3, -1, 2**31])
def test_labels_out_of_range(name: str, layout: str, label: int) -> None:
    trainer = Trainer(with_loss(name), layout=layout)
    before = trainer.state_dict()
    x, labels = data(8)
    labels[5] = label
    message = f"'labels' has {label} in row 5 of the batch; the model has 3 classes: 0 to 2\nhint"
    with pytest.raises(LabelError, match=message):
        trainer.step(x, labels)
    with pytest.raises(LabelError, match=message):
        trainer.evaluate_batch(x, labels)
    same(before, trainer.state_dict())
    assert trainer.global_step == 0
    trainer.step(*data(8))


@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_ignored_labels(ignored: int) -> None:
    loss = losses.CrossEntropy(ignore_index=ignored)
    trainer = Trainer(made(loss=[losses.LossTerm(loss, output="scores")]))
    x, labels = data(8)
    labels[2] = ignored
    trainer.step(x, labels)
    labels[6] = 4
    with pytest.raises(LabelError, match=f"4 in row 6 .*\n.*label {ignored} are ignored"):
        trainer.step(x, labels)


def test_rows_in_errors_are_rows_of_the_data(tmp_path: Path) -> None:
    made().save(tmp_path)
    x, labels = data(80)
    labels[70] = 3
    trainer = Trainer(tmp_path)
    with pytest.raises(LabelError, match="'labels' has 3 in row 70; the model has 3 classes"):
        trainer.fit((x, labels), batch_size=16, progress=False)
    with pytest.raises(LabelError, match="'labels' has 3 in row 70; the model has 3 classes"):
        trainer.evaluate({"x": x, "labels": labels}, batch_size=16)
    with pytest.raises(LabelError, match="in row 70;"):
        trainer.fit(data(16), validation=(x, labels), progress=False)


def test_labels_counted_from_1() -> None:
    x, labels = data(30)
    with pytest.raises(LabelError, match=r"more of the batch.*\nhint: .*subtract 1"):
        Trainer(made()).step(x, np.asarray(labels) + 1)
