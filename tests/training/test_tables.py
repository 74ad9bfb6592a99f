"""Tables by column name, targets without a last axis, and invalid options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    expected = Trainer(made()).fit((x, labels), epochs=2, batch_size=8, progress=False)
    trainer = Trainer(made())
    history = trainer.fit(table, epochs=2, batch_size=8, validation=table, progress=False)
    assert history.losses == expected.losses
    assert trainer.evaluate(table).loss == trainer.evaluate((x, labels)).loss


def test_tables_with_wrong_columns() -> None:
    x, labels = data(8)
    with pytest.raises(
        ShapeError, match=r"no column 'labels'\nhint: the columns are 'x', 'y'; the model needs"
    ):
        Trainer(made()).fit(Frame({"x": x, "y": labels}), progress=False)
    ragged = np.empty(8, object)
    ragged[:] = [np.zeros(5 + i % 2) for i in range(8)]
    with pytest.raises(ShapeError, match="column 'x' has rows of different shapes"):
        Trainer(made()).fit(_Ragged(ragged, labels), progress=False)


def test_one_column_per_feature() -> None:
    x, labels = data(40)
    names = np.array(["cat", "ant", "bee"])[labels]
    columns = {f"x.{i}": x[:, i] for i in range(6)}
    shuffled = {n: columns[n] for n in ("x.3", "x.0", "x.5", "x.1", "x.4", "x.2")}
    features = {f"feature {n}": a for n, a in columns.items()}
    order = np.array([2, 0, 1])[labels]  # ant, bee, cat
    expected = Trainer(made()).fit((x, order), epochs=2, progress=False).losses
    for given in (
        Frame({**columns, "labels": names}),
        Frame({"label": names, **shuffled}),
        Table({**features, "labels": names}),
        {**columns, "labels": names.tolist()},
        {"x": x, "labels": names.astype(object), "id": names},
        (Frame(features), names),
        (Frame(features), Frame({"animal": names})),
        (x.astype(np.float64), Frame({"animal": names})["animal"]),
        ({"x": x}, {"labels": names}),
    ):
        trainer = Trainer(made())
        assert trainer.fit(given, epochs=2, progress=False).losses == expected
        assert trainer.classes == {"labels": ["ant", "bee", "cat"]}
        scores = trainer.predict(x)["scores"]
        for inputs in (Frame({**columns, "labels": names}), {"x": x, "labels": names}):
            np.testing.assert_array_equal(trainer.predict(inputs)["scores"], scores)


def test_fit_takes_targets_as_its_second_argument() -> None:
    x, labels = data(40)
    expected = Trainer(made()).fit((x, labels), epochs=2, progress=False).losses
    trainer = Trainer(made())
    assert trainer.fit(x, labels, epochs=2, progress=False).losses == expected
    assert trainer.evaluate(x, labels) == trainer.evaluate((x, labels))
    assert trainer.fit(x.tolist(), labels.tolist(), progress=False).losses
    with pytest.raises(OnnxTrainError, match=r"y must be the targets, got 3\nhint: .*epochs=3"):
        trainer.fit((x, labels), 3)


def test_class_names_stay_with_the_weights(tmp_path: Path) -> None:
    x, labels = data(40)
    names = np.array(["cat", "ant", "bee"])[labels]
    trainer = Trainer(made())
    trainer.fit(x, names, epochs=2, directory=tmp_path / "run", progress=False)
    trainer.save(tmp_path / "weights")
    again = Trainer(made())
    again.load(tmp_path / "weights")
    assert again.classes == {"labels": ["ant", "bee", "cat"]}
    few = names != "ant"  # without its first class, the order of these labels alone differs
    indices = np.array([2, 0, 1])[labels]
    assert again.evaluate(x[few], names[few]) == again.evaluate(x[few], indices[few])
    with pytest.raises(ShapeError, match="row 1: unknown class 'cow'\nhint: expected one of 'ant'"):
        again.evaluate(x[:2], ["ant", "cow"])
    resumed = Trainer(made())
    resumed.fit(
        x[few], names[few], epochs=3, directory=tmp_path / "run", resume=True, progress=False
    )
    assert resumed.classes == again.classes


def test_texts_in_batches_need_known_class_names() -> None:
    x, labels = data(40)
    names = np.array(["ant", "bee", "cat"])[labels]
    trainer = Trainer(made())
    message = "class names are unknown\nhint: trainer.classes = {'labels': "
    with pytest.raises(ShapeError, match=message):
        trainer.fit([(x, names)], progress=False)
    trainer.classes = {"labels": ["ant", "bee", "cat"]}
    expected = Trainer(made()).fit([(x, labels)], progress=False).losses
    assert trainer.fit([(x, names)], progress=False).losses == expected


def test_wrong_cells_are_named_by_row_and_column() -> None:
    x, labels = data(8)
    for column, message in (
        (["1"] * 5 + ["one"] + ["2"] * 2, "row 5, column 'a': 'one' is not a number"),
        (["1", None, *["2"] * 6], "row 1, column 'a': empty cell"),
    ):
        with pytest.raises(ShapeError, match=message):
            Trainer(made()).fit(Frame({"a": column, "labels": labels, **_five(x)}), progress=False)
    for bad, message in (
        (["a", None, *"abcabc"], "row 1, column 'labels': empty cell\nhint: every row needs"),
        ([0, 1, np.nan, *[0] * 5], "'labels' is int64, got NaN in row 2\n"),
        ([0, 1, np.nan, 1.5, *[0] * 4], r"'labels' is int64, got NaN in row 2 \(and 1 more\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            Trainer(made()).fit({"x": x, "labels": bad}, progress=False)


def _five(x: np.ndarray) -> dict[str, np.ndarray]:
    return {name: x[:, i] for i, name in enumerate("bcdef")}


def test_single_rows_are_not_batches() -> None:
    x, labels = data(8)
    rows = list(zip(x, labels, strict=True))
    message = r"single rows, and batches are expected: x \[6\], labels \[\]\nhint: "
    with pytest.raises(ShapeError, match=message):
        Trainer(made()).fit(rows, progress=False)
    with pytest.raises(ShapeError, match=message):
        Trainer(made()).fit(lambda _: iter([{"x": a, "labels": b} for a, b in rows]))


def test_extra_arrays_of_batches_stay_unread() -> None:
    x, labels = data(16)
    expected = Trainer(made()).fit([(x, labels)], progress=False).losses
    given = [{"id": ["a"] * 16, "x": x, "label": labels}]
    assert Trainer(made()).fit(given, progress=False).losses == expected


def test_files_by_path(tmp_path: Path) -> None:
    x, labels = data(16)
    np.savez(tmp_path / "train.npz", x=x, labels=labels)
    expected = Trainer(made()).fit((x, labels), validation=(x, labels), progress=False).epochs
    path = tmp_path / "train.npz"
    trainer = Trainer(made())
    assert trainer.fit(str(path), validation=path, progress=False).epochs == expected
    assert trainer.evaluate(str(path)) == trainer.evaluate((x, labels))


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
    message = r"got shape \[8, 6\]\nhint: .*fixes the batch size: use batch_size=16, or"
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
