"""Nets as onnxruntime's own optimizers and quantisers leave them; ``make wild`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wild.inputs import Sizes, dimension
from tests.wild.judge import Row, judge
from tests.wild.report import merge, read, summary

MADE = ["mlp-basic", "mlp-extended", "mlp-fp16", "mlp-fp16-io32", "mlp-int4-0", "mlp-int4-4"]
MADE += ["cnn-basic", "cnn-extended", "cnn-fp16-io32", "attention-basic", "attention-extended"]
MADE += ["attention-int4-4", "lstm-basic"]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of the nets, made once for all tests of a process."""
    producer = pytest.importorskip("tests.wild.producers.ort_models", reason="needs torch")
    folder = tmp_path_factory.mktemp("wild")
    for name in ("mlp", "cnn", "attention", "lstm"):
        path = producer.exported(folder, name)
        producer.optimised(path, "basic")
        producer.optimised(path, "extended")
    for name in ("mlp", "cnn"):
        producer.halved(folder / f"{name}.onnx")
    for name in ("mlp", "attention"):
        producer.four_bits(folder / f"{name}.onnx")
    return folder


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore")
def test_files_of_other_tools_train_right(files: Path, name: str) -> None:
    row = judge(files / f"{name}.onnx", name)
    assert row.verdict == "trains right", row


def test_sizes_are_told_by_names() -> None:
    sizes = Sizes(99, batch=3, window=32)
    assert dimension(7, 1, sizes) == 7
    assert dimension("batch_size", 0, sizes) == 3
    assert dimension("past_sequence_length", 2, sizes) == 0
    assert dimension("past_sliding_length", 2, sizes) == 32
    assert dimension("past_sequence_length + sequence_length", 1, sizes) == 6
    assert dimension(None, 1, sizes) == 99


def test_rows_are_kept_by_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge([Row("a/x", "refused"), Row("b/y", "trains right")], path)
    merge([Row("a/x", "trains right")], path)
    assert [(r.file, r.verdict) for r in read(path)] == [
        ("a/x", "trains right"),
        ("b/y", "trains right"),
    ]
    assert summary(read(path)).split() == ["2", "trains", "right", "2", "files"]
