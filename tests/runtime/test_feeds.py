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
        as_source(([[1.0], [1.0, 2.0]], [0, 1]), batch_size=2)
