"""Data files that are damaged or hostile raise named errors, fast and in little memory."""

from __future__ import annotations

import io
import json
import os
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.training import read_data
from onnxtrain.training.data_files import read_images, sorted_labels
from tests.training.test_data_files import LABELS, TARGET, X, image_spec, written


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("inf", "has infinity or NaN"),
        ("nan", "has infinity or NaN"),
        ("1e400", "has infinity or NaN"),
        (str(2**63), r"has integers outside \[-9223372036854775808, 9223372036854775807\]"),
        ("1e19", "has integers outside"),
        (str(-(2**63) - 1), "has integers outside"),
    ],
)
def test_labels_that_are_not_int64_are_refused_with_their_line(
    tmp_path: Path, cell: str, problem: str
) -> None:
    table = written(tmp_path / "a.csv", "a,b,c,labels", "1,2,3,0", f"1,2,3,{cell}")
    with pytest.raises(OnnxTrainError, match=f"line 3, column 'labels' {problem}"):
        read_data(table, [X, LABELS])
    number = {"inf": "Infinity", "nan": "NaN"}.get(cell, cell)
    row = '{"x": [1, 2, 3], "labels": %s}'
    lines = written(tmp_path / "a.jsonl", row % 0, row % number)
    with pytest.raises(OnnxTrainError, match=f"line 2, column 'labels' {problem}"):
        read_data(lines, [X, LABELS])


def test_integers_fit_the_type_of_the_tensor(tmp_path: Path) -> None:
    small = replace(LABELS, dtype="uint8")
    path = written(tmp_path / "a.csv", "a,b,c,labels", "1,2,3,256")
    with pytest.raises(OnnxTrainError, match=r"integers outside \[0, 255\], but 'labels' is uint8"):
        read_data(path, [X, small])


def test_null_in_json_is_not_a_number(tmp_path: Path) -> None:
    for x in ("[1, null, 3]", "null"):
        path = written(tmp_path / "a.jsonl", f'{{"x": {x}, "labels": 0}}')
        with pytest.raises(OnnxTrainError, match="line 1, column 'x'"):
            read_data(path, [X, LABELS])


def test_line_separators_inside_json_texts_do_not_end_a_line(tmp_path: Path) -> None:
    row = json.dumps({"x": [1, 2, 3], "labels": "a\u2028b\x85"}, ensure_ascii=False)
    data = read_data(written(tmp_path / "a.jsonl", row, row + "\r"), [X, LABELS])
    assert data.classes == {"labels": ["a\u2028b\x85"]}
    assert data.arrays["x"].shape == (2, 3)


def test_many_columns_are_read_in_linear_time(tmp_path: Path) -> None:
    def seconds(columns: int) -> float:
        spec = replace(X, shape=("batch", columns))
        names = ",".join(f"c{i}" for i in range(columns))
        path = written(tmp_path / "a.csv", f"{names},labels", "1," * columns + "0")
        start = time.process_time()
        assert read_data(path, [spec, LABELS]).arrays["x"].shape == (1, columns)
        return time.process_time() - start

    seconds(100)
    assert seconds(100_000) < 5


def test_one_long_cell_does_not_widen_a_column(tmp_path: Path) -> None:
    rows = ["1,2,3,0"] * 2000 + ["0." + "1" * 100_000 + ",2,3,0"]
    path = written(tmp_path / "a.csv", "a,b,c,labels", *rows)
    tracemalloc.start()
    try:
        read_data(path, [X, LABELS])
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_an_npz_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    zeros = io.BytesIO()
    np.save(zeros, np.zeros(1 << 24, np.float32))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(20):  # 1.3 GB in 1.3 MB
            archive.writestr(f"a{i}.npy", zeros.getvalue())
    tracemalloc.start()
    try:
        with pytest.raises(OnnxTrainError, match="bytes once unpacked"):
            read_data(path, [X, LABELS])
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_compressed_arrays_of_a_usual_size_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1 << 20, 3), np.float32))
    assert read_data(tmp_path / "a.npz", [X]).arrays["x"].shape == (1 << 20, 3)


def test_tables_over_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.training.data_files.TABLE_BYTES", 10)
    path = written(tmp_path / "a.csv", "a,b,c,labels", "1,2,3,0")
    with pytest.raises(OnnxTrainError, match="the file has 21 bytes, the limit is 10"):
        read_data(path, [X, LABELS])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.npz"])
def test_pipes_and_devices_are_not_data(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OnnxTrainError, match="not a regular file"):
        read_data(tmp_path / name, [X, LABELS])
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(OnnxTrainError, match="not a regular file"):
        read_data(tmp_path / name, [X, LABELS])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with an image of each class, beside a folder that it must not lead to."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name in ("inside/a", "inside/b", "outside"):
        (tmp_path / name).mkdir(parents=True)
        image.new("RGB", (4, 2)).save(tmp_path / name / "0.png")
    return tmp_path / "inside"


IMAGE = (image_spec(3, 2, 4), LABELS)


@pytest.mark.parametrize(
    "target", ["../outside/0.png", "/etc/passwd", "link/0.png", "link.png", "a/0.png\0", "pipe.png"]
)
def test_image_tables_stay_in_their_folder(images: Path, target: str) -> None:
    (images / "link").symlink_to(images.parent / "outside")
    (images / "link.png").symlink_to(images.parent / "outside" / "0.png")
    os.mkfifo(images / "pipe.png")
    path = written(images / "a.csv", "image,label", "a/0.png,a", f"{target},b")
    with pytest.raises(OnnxTrainError, match=r"line 3: image .* cannot be read"):
        read_images(path, IMAGE)
    path = written(images / "a.csv", "image,label", f"{images}/a/0.png,a", "b/../b/0.png,b")
    assert len(read_images(path, IMAGE).arrays["image"]) == 2


def test_image_folders_do_not_follow_links_out(images: Path) -> None:
    (images / "a" / "1.png").symlink_to(images / "b" / "0.png")
    assert len(read_data(images, IMAGE).arrays["image"]) == 3
    (images / "a" / "2.png").symlink_to(images.parent / "outside" / "0.png")
    with pytest.raises(OnnxTrainError, match="leads out of the folder"):
        read_data(images, IMAGE)
    (images / "a" / "2.png").unlink()
    (images / "c").symlink_to(images.parent / "outside")
    with pytest.raises(OnnxTrainError, match="leads out of the folder"):
        read_data(images, IMAGE)


def test_labels_that_look_like_digits() -> None:
    assert sorted_labels(["10", "²", "9", "1" * 5000]) == ["9", "10", "1" * 5000, "²"]


def test_a_column_number_with_thousands_of_digits(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"x{'1' * 5000},target", "1,2")
    arrays = read_data(path, [replace(X, shape=("batch", 1)), TARGET]).arrays
    np.testing.assert_array_equal(arrays["x"], [[1]])
