"""Tables by column name, targets without a last axis, and invalid options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError, ShapeError
from onnxtrain.training import Trainer
from tests.artifacts.models import data, finished, graph, weight

from .made import made


class Frame:
    """As pandas: columns, [name], to_numpy; a column of arrays is one of objects."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._data = columns
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))

    def __getitem__(self, name: str) -> Any:
        column = np.asarray(self._data[name])
        if column.ndim == 1:
            return column
        rows = np.empty(len(column), object)
        rows[:] = list(column)
        return rows

    def to_numpy(self) -> Any:
        raise AssertionError("a table is read by column")


class Column:
    """As an Arrow column: an array by the protocol, of objects if it is nested."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return Frame({"c": self._values})["c"]


class Table(Frame):
    """As Arrow: column_names, and columns that are a list of columns."""

    def __init__(self, columns: dict[str, Any]) -> None:
        super().__init__(columns)
        self.column_names, self.columns = self.columns, [Column(c) for c in columns.values()]

    def __getitem__(self, name: str) -> Any:
        return Column(self._data[name])


class Dataset(Frame):
    """As Hugging Face's: column_names, columns as lists, rows by iteration."""

    def __init__(self, columns: dict[str, Any]) -> None:
        super().__init__(columns)
        self.column_names = self.columns
        del self.columns

    def __getitem__(self, name: Any) -> Any:
        return np.asarray(self._data[name]).tolist()

    def __iter__(self) -> Any:
        raise AssertionError("a table is read by column")


@pytest.mark.parametrize("kind", [Frame, Table, Dataset])
def test_tables(kind: Callable[..., Any]) -> None:
    x, labels = data(40)
    table = kind({"id": [str(i) for i in range(40)], "labels": labels, "x": x})
    expected = Trainer(made()).fit((x, labels), 2, batch_size=8, progress=False)
    trainer = Trainer(made())
    history = trainer.fit(table, 2, batch_size=8, validation=table, progress=False)
    assert history.losses == expected.losses
    assert trainer.evaluate(table).loss == trainer.evaluate((x, labels)).loss


def test_tables_with_wrong_columns() -> None:
    x, labels = data(8)
    with pytest.raises(
        ShapeError, match=r"no column 'labels'\nhint: its columns are x, y; the model needs"
    ):
        Trainer(made()).fit(Frame({"x": x, "y": labels}), progress=False)
    ragged = np.empty(8, object)
    ragged[:] = [np.zeros(5 + i % 2) for i in range(8)]
    with pytest.raises(ShapeError, match="column 'x' has rows of different shapes"):
        Trainer(made()).fit(_Ragged(ragged, labels), progress=False)


class _Ragged(Frame):
    def __init__(self, x: np.ndarray, labels: np.ndarray) -> None:
        super().__init__({"x": x, "labels": labels})

    def __getitem__(self, name: str) -> Any:
        return self._data[name]


def regression() -> Trainer:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4])
    w = weight(op, "w", np.ones((4, 1), np.float32))
    return Trainer(build(finished(op, y=op.MatMul(x, w)), loss="mse", optimizer="sgd"))


def test_a_target_without_its_last_axis() -> None:
    x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    y = x.sum(1) + 1
    expected = regression().step(x, y[:, None]).loss
    assert regression().step(x, y).loss == expected
    assert regression().step(x, y.astype(np.float64)).loss == expected
    trainer = regression()
    first, second = (trainer.step(x, y).loss for _ in range(2))
    assert second < first == expected
    with pytest.raises(ShapeError, match="batch is 2 here and 16 in"):
        regression().step(x, y.reshape(2, 8))
    with pytest.raises(ShapeError, match=r"'x' is float32\[batch, 4\], got shape \[16\]"):
        regression().step(y, y)


def test_another_size_than_the_fixed_batch() -> None:
    trainer = Trainer(made(dims={"batch": 16}))
    message = (
        r"got shape \[8, 6\]\nhint: .*fixes the batch size: use batch_size=16 \(--batch-size 16"
    )
    with pytest.raises(ShapeError, match=message):
        trainer.step(*data(8))
    with pytest.raises(ShapeError, match=message):
        trainer.fit(data(32), batch_size=8, progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 1.5},
        {"epochs": 0},
        {"epochs": -1},
        {"epochs": True},
        {"epochs": "3"},
        {"batch_size": 0},
        {"batch_size": 8.0},
        {"keep": 0},
        {"patience": 0},
    ],
)
def test_invalid_numbers(options: dict) -> None:
    (name,) = options
    with pytest.raises(OnnxTrainError, match=f"{name} must be an integer of at least 1, got "):
        Trainer(made()).fit(data(8), progress=False, **options)
