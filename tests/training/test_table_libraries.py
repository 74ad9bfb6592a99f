"""Tables of pandas, polars, Arrow and Hugging Face datasets, if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxtrain.errors import ShapeError
from onnxtrain.training import Trainer
from tests.artifacts.models import data

from .made import made

NAMES = np.array(["cat", "ant", "bee"])


def columns() -> dict[str, Any]:
    """Return one column per feature, names of animals, and a column that is no feature."""
    x, labels = data(40)
    return {f"x.{i}": x[:, i] for i in range(6)} | {"label": NAMES[labels].tolist(), "id": "a" * 40}


def pandas(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(columns)


def pandas_categories(columns: dict[str, Any]) -> Any:
    return pandas(columns).astype({"label": "category"})


def polars(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").DataFrame(columns)


def arrow(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed").table(columns)


def hugging_face(columns: dict[str, Any]) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_dict(columns)


LIBRARIES = [pandas, pandas_categories, polars, arrow, hugging_face]


@pytest.mark.parametrize("table", LIBRARIES)
def test_one_column_per_feature_and_text_labels(table: Callable[..., Any]) -> None:
    x, labels = data(40)
    given = {**columns(), "id": [str(i) for i in range(40)]}
    expected = Trainer(made()).fit((x, np.array([2, 0, 1])[labels]), epochs=2, progress=False)
    trainer = Trainer(made())
    frame = table(given)
    history = trainer.fit(frame, validation=frame, epochs=2, progress=False)
    assert history.losses == expected.losses
    assert trainer.classes == {"labels": ["ant", "bee", "cat"]}
    np.testing.assert_array_equal(trainer.predict(frame)["scores"], trainer.predict(x)["scores"])


@pytest.mark.parametrize("table", LIBRARIES)
def test_a_missing_label_is_named(table: Callable[..., Any]) -> None:
    given = {**columns(), "id": [""] * 40}
    given["label"] = [*given["label"][:7], None, *given["label"][8:]]
    with pytest.raises(ShapeError, match="row 7, column 'label': empty cell"):
        Trainer(made()).fit(table(given), progress=False)


def test_frames_and_series_as_x_and_y() -> None:
    frame = pandas({**columns(), "id": [""] * 40}).drop(columns="id")
    x, y = frame.drop(columns="label"), frame["label"]
    expected = Trainer(made()).fit(frame, progress=False).losses
    assert Trainer(made()).fit(x, y, progress=False).losses == expected
    assert Trainer(made()).fit(x.to_numpy(), frame[["label"]], progress=False).losses == expected


def test_columns_that_pandas_numbers() -> None:
    x, labels = data(40)
    frame = pandas(dict(enumerate(x.T)) | {"labels": labels})
    expected = Trainer(made()).fit((x, labels), progress=False).losses
    assert Trainer(made()).fit(frame, progress=False).losses == expected


def test_class_names_that_a_hugging_face_data_set_declares() -> None:
    x, labels = data(40)
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), 6),
            "label": datasets.ClassLabel(names=["cat", "ant", "bee"]),
        }
    )
    rows = datasets.Dataset.from_dict({"x": x.tolist(), "label": labels.tolist()}, features)
    expected = Trainer(made()).fit((x, labels), progress=False).losses
    trainer = Trainer(made())
    assert trainer.fit(rows, progress=False).losses == expected
    assert trainer.classes == {"labels": ["cat", "ant", "bee"]}
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    with pytest.raises(
        ShapeError, match=r"DatasetDict has splits: 'train', 'test'\nhint: .*'train'"
    ):
        trainer.fit(splits)
