"""Arrays from CSV, JSONL and folders of images."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import TensorSpec
from onnxtrain.training import read_data

X = TensorSpec("x", "float32", ("batch", 3), "input")
LABELS = TensorSpec("labels", "int64", ("batch",), "target")
TARGET = TensorSpec("target", "float32", ("batch", 1), "target")


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_remaining_columns_are_the_input(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "labels,height,width,depth", "1,0.5,2,3", "0,4,5,6e-1")
    data = read_data(path, [X, LABELS])
    np.testing.assert_array_equal(data.arrays["x"], [[0.5, 2, 3], [4, 5, 0.6]])
    np.testing.assert_array_equal(data.arrays["labels"], [1, 0])
    assert data.arrays["labels"].dtype == np.int64
    assert data.classes == {}


@pytest.mark.parametrize("names", ["x.{}", "x_{}", "x{}", "x[{}]"])
def test_numbered_columns_are_sorted_by_number(tmp_path: Path, names: str) -> None:
    header = ",".join([names.format(10), names.format(2), names.format(1), "id", "labels"])
    path = written(tmp_path / "a.csv", header, "10,2,1,77,0")
    np.testing.assert_array_equal(read_data(path, [X, LABELS]).arrays["x"], [[1, 2, 10]])


def test_label_is_labels_and_labels_is_not_an_input(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "label,a,b,c", "1,2,3,4")
    arrays = read_data(str(path), [X, LABELS]).arrays
    np.testing.assert_array_equal(arrays["labels"], [1])
    np.testing.assert_array_equal(arrays["x"], [[2, 3, 4]])


def test_npz_files_follow_the_same_rules(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)), label=["cat", "ant"], id=[7, 8])
    data = read_data(tmp_path / "a.npz", [X, LABELS])
    assert sorted(data.arrays) == ["labels", "x"]
    assert data.arrays["labels"].tolist() == [1, 0]
    assert data.classes == {"labels": ["ant", "cat"]}


def test_shapes_of_inputs(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "a\tb\tc\td\ttarget", "1\t2\t3\t4\t5")
    square = TensorSpec("x", "float32", ("batch", 2, "width"), "input")
    arrays = read_data(path, [square, TARGET]).arrays
    np.testing.assert_array_equal(arrays["x"], [[[1, 2], [3, 4]]])
    np.testing.assert_array_equal(arrays["target"], [[5]])


def test_text_labels_keep_their_class_indices(tmp_path: Path) -> None:
    first = written(
        tmp_path / "a.csv", "a,b,c,labels", "1,2,3,cat", '4,5,6,"dog, big"', "1,1,1,ant"
    )
    data = read_data(first, [X, LABELS])
    assert data.classes == {"labels": ["ant", "cat", "dog, big"]}
    np.testing.assert_array_equal(data.arrays["labels"], [1, 2, 0])
    second = written(tmp_path / "b.csv", "a,b,c,labels", "1,2,3,cat")
    np.testing.assert_array_equal(
        read_data(second, [X, LABELS], data.classes).arrays["labels"], [1]
    )
    third = written(tmp_path / "c.csv", "a,b,c,labels", "1,2,3,cow")
    with pytest.raises(
        OnnxTrainError, match=r"line 2: unknown class 'cow'\nhint: expected one of 'ant'"
    ):
        read_data(third, [X, LABELS], data.classes)


def test_lines_of_json(tmp_path: Path) -> None:
    rows = [
        {"x": [1, 2, 3], "labels": "b", "note": "n"},
        {"labels": "a", "note": "", "x": [4, 5, 6]},
    ]
    path = written(tmp_path / "a.jsonl", *(json.dumps(r) for r in rows), "")
    data = read_data(path, [X, LABELS])
    np.testing.assert_array_equal(data.arrays["x"], [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(data.arrays["labels"], [1, 0])


def test_large_integers_are_exact(tmp_path: Path) -> None:
    ids = TensorSpec("ids", "int64", ("batch",), "input")
    path = written(tmp_path / "a.csv", "ids,labels", f"{2**53 + 1},0")
    assert int(read_data(path, [ids, LABELS]).arrays["ids"][0]) == 2**53 + 1


REFUSED = {
    "a.csv": [
        (["1,2,3,4", "1,2,3,4"], "the first line has numbers"),
        (["a,b,c,labels"], "no rows"),
        (["a,b,c,labels", "1,2,3"], "line 2 has 3 cells, expected 4"),
        (["a,b,c,labels", "1,2,3,0", "", "1,,3,0"], "line 4, column 'b': empty cell"),
        (["a,b,c,labels", "1,2,zwei,0"], "line 2, column 'c': 'zwei' is not a number"),
        (["a,b,labels", "1,2,0"], "2 columns do not fit 'x', which is float32[batch, 3]"),
        (["a,b,c,kind", "1,2,3,0"], "no column 'x'"),
        (["a,b,c,labels", "1,2,3,cat", "1,2,3,"], "line 3, column 'labels': empty cell"),
        (["a,a,c,labels", "1,2,3,0"], "duplicate column 'a'"),
        (["a,b,c,labels", "1,2,3,0.5"], "column 'labels' has fractions"),
        (["a,b,c,labels", "1,2,3,0", "1,2,3,?"], "line 3, column 'labels': '?' is not a number"),
        (["a,b,c,labels", '1,2,"3,0'], "unexpected end of data"),
    ],
    "a.jsonl": [
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 is not an object"),
        (['{"x": [1, 2, 3], "labels": 0}', '{"x": [1, 2, 3]}'], "'labels' is not in every line"),
        (['{"x": [1], "labels": 0}', '{"x": [1, 2], "labels": 0}'], "rows of different shapes"),
        (['{"x": [1.5, 2, 3], "labels": 0.5}'], "has fractions"),
        (["", ""], "no rows"),
    ],
}


@pytest.mark.parametrize(
    ("name", "lines", "message"), [(n, *case) for n, cases in REFUSED.items() for case in cases]
)
def test_errors_name_the_line(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(OnnxTrainError) as caught:
        read_data(written(tmp_path / name, *lines), [X, LABELS])
    assert message in str(caught.value)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,\xff\n")
    with pytest.raises(OnnxTrainError, match="not UTF-8"):
        read_data(tmp_path / "a.csv", [X, LABELS])
    with pytest.raises(OnnxTrainError, match="no such file or folder"):
        read_data(tmp_path / "none.csv", [X, LABELS])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes: red images of 4 x 2 and blue ones of 8 x 4."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name, colour, size in (("b-red", (255, 0, 0), (4, 2)), ("a-blue", (0, 0, 255), (8, 4))):
        (tmp_path / name).mkdir()
        for i in range(2):
            image.new("RGB", size, colour).save(tmp_path / name / f"{i}.png")
    (tmp_path / "readme.txt").write_text("not a class")
    return tmp_path


def image_spec(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec("image", dtype, ("batch", *shape), "input")


def test_images_in_class_folders(folder: Path) -> None:
    data = read_data(folder, [image_spec(3, 2, 4), LABELS])
    assert data.classes == {"labels": ["a-blue", "b-red"]}
    np.testing.assert_array_equal(data.arrays["labels"], [0, 0, 1, 1])
    image = data.arrays["image"]
    assert (image.shape, image.dtype) == ((4, 3, 2, 4), np.float32)
    np.testing.assert_array_equal(image[0, :, 0, 0], [0, 0, 1])
    np.testing.assert_array_equal(image[3, :, 1, 3], [1, 0, 0])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 4, 3), (2, 4, 3)), ((1, 2, 4), (1, 2, 4)), ((2, 4), (2, 4)), ((16,), (16,))],
)
def test_other_image_layouts(
    folder: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    arrays = read_data(folder, [image_spec(*shape), LABELS]).arrays
    assert arrays["image"].shape == (4, *expected)


def test_integer_images_and_symbolic_sizes(folder: Path) -> None:
    arrays = read_data(folder, [image_spec(3, 2, 4, dtype="uint8"), LABELS]).arrays
    assert arrays["image"].max() == 255
    with pytest.raises(OnnxTrainError, match="all images must have the same"):
        read_data(folder, [image_spec(3, "h", "w"), LABELS])


def test_folders_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OnnxTrainError, match="unknown class 'b-red'"):
        read_data(folder, [image_spec(3, 2, 4), LABELS], {"labels": ["a-blue", "c"]})
    with pytest.raises(OnnxTrainError, match="is not an image shape"):
        read_data(folder, [image_spec(5), LABELS])
    with pytest.raises(OnnxTrainError, match="class labels"):
        read_data(folder, [image_spec(3, 2, 4), TARGET])
    (folder / "b-red" / "2.png").write_bytes(b"not an image")
    with pytest.raises(OnnxTrainError, match=r"2\.png: not a readable image"):
        read_data(folder, [image_spec(3, 2, 4), LABELS])
    (tmp_path / "none").mkdir()
    with pytest.raises(OnnxTrainError, match="no images"):
        read_data(tmp_path / "none", [image_spec(3, 2, 4), LABELS])


def test_csv_dialects(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c", "labels"], [1, 2.5, 3, 1]])  # BOM, \r\n
    np.testing.assert_array_equal(
        read_data(tmp_path / "a.csv", [X, LABELS]).arrays["x"], [[1, 2.5, 3]]
    )
