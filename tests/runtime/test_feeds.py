"""Batches like the last one skip all checks; all others are checked."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain.errors import ShapeError
from onnxtrain.manifest import TensorSpec
from onnxtrain.runtime.feeds import Feeder
from onnxtrain.training.data import as_source

SPECS = (
    TensorSpec("x", "float32", ("batch", 3), "input"),
    TensorSpec("y", "int64", ("batch",), "target"),
)


def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((size, 3), np.float32), np.ones(size, np.int64)


def test_batches_like_the_last_one_are_not_copied() -> None:
    feeder = Feeder(SPECS)
    feeder(batch(4), {})
    x, y = batch(4)
    feeds = feeder((x, y), {})
    assert feeds["x"] is x
    assert feeds["y"] is y


def test_other_batches_are_converted() -> None:
    feeder = Feeder(SPECS)
    feeder(batch(4), {})
    x, y = batch(4)
    turned = np.ones((3, 4), np.float32).T
    for given in ((turned, y), (x.astype(np.float64), y), (x.tolist(), y.tolist())):
        feeds = feeder(given, {})
        assert feeds["x"].flags.c_contiguous
        assert (feeds["x"].dtype, feeds["x"].shape) == (np.float32, (4, 3))
    assert feeder((), {"x": x, "y": y})["x"].shape == (4, 3)
    assert feeder(batch(5), {})["x"].shape == (5, 3)


@pytest.mark.parametrize(
    "given",
    [(np.ones((4, 2), np.float32), np.ones(4, np.int64)), (np.ones((4, 3), np.float32),), batch(4)],
    ids=["shape", "missing", "sizes"],
)
def test_wrong_batches_are_errors(given: tuple[np.ndarray, ...]) -> None:
    feeder = Feeder(SPECS)
    feeder(batch(4), {})
    if len(given) == 2 and given[0].shape == (4, 3):
        given = (given[0], np.ones(3, np.int64))
    with pytest.raises(ShapeError):
        feeder(given, {})


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((4, 3, 1)), np.ones(4), r"got shape \[4, 3, 1\]\nhint: x.reshape\(-1, 3\)"),
        (np.ones(3), np.ones(4), r"got shape \[3\]\nhint: this is one row; .* x\[np.newaxis\]"),
        (np.ones((4, 3)), [0, np.nan, 1, np.nan], r"got NaN in row 1 of the batch \(and 1 more\)"),
        (np.ones((4, 3)), [0, 1, 0.5, 1], "got 0.5 in row 2 of the batch\nhint: class labels are"),
        (np.ones((4, 3)), np.full((4, 2), 0.5), "class index per row; .*probabilities=True"),
        (np.ones((4, 3)), list("abca"), "'y' is int64, got <U1\nhint: fit and evaluate accept"),
    ],
)
def test_messages_say_how_to_fix_a_batch(x: object, y: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Feeder(SPECS)((x, y), {})


@pytest.mark.parametrize(
    "given",
    [
        np.eye(3)[[2, 0, 1]],
        np.eye(3, dtype=bool)[[2, 0, 1]],
        np.array([[2], [0], [1]]),
        np.array([2.0, 0.0, 1.0]),
        np.array([[2.0], [0.0], [1.0]]),
    ],
    ids=["one-hot", "one-hot bool", "[N, 1]", "float", "float [N, 1]"],
)
def test_labels_in_other_forms_are_class_indices(given: np.ndarray) -> None:
    feeds = Feeder(SPECS)((np.ones((3, 3)), given), {})
    assert feeds["y"].tolist() == [2, 0, 1]
    assert feeds["y"].dtype == np.int64


def test_a_last_axis_of_size_one_may_be_missing_or_added() -> None:
    row, column = np.ones(3, np.float32), np.ones((3, 1), np.float32)
    for shape in (("batch",), ("batch", 1)):
        feeder = Feeder([TensorSpec("y", "float32", shape, "target")])
        assert feeder((row,), {})["y"].shape == feeder((column,), {})["y"].shape == (3, *shape[1:])


def test_ragged_lists_and_masks_are_errors() -> None:
    feeder = Feeder(SPECS)
    _, y = batch(2)
    with pytest.raises(ShapeError, match=r"'x': rows have different lengths.*\nhint: pad them"):
        feeder(([[1.0, 2.0, 3.0], [1.0]], y), {})
    values = np.ones((2, 3), np.float32)
    hidden = np.ma.masked_greater(np.arange(6, dtype=np.float32).reshape(2, 3), 3)
    with pytest.raises(ShapeError, match=r"'x': 2 values are masked"):
        feeder((hidden, y), {})
    assert type(feeder((np.ma.masked_array(values), y), {})["x"]) is np.ndarray
    with pytest.raises(ShapeError, match="rows have different lengths"):
        as_source(([[1.0], [1.0, 2.0]], [0, 1]), SPECS, batch_size=2)
