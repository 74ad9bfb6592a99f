"""Nets as onnxruntime's own optimizers and quantizers leave them; ``make wild`` has the rest."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from tests.wild.inputs import Sizes, dimension, with_heads
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
        producer.optimized(path, "basic")
        producer.optimized(path, "extended")
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


ENCODER = {
    "table.weight": (40, 32),
    "layers.layers.0.self_attn.in_proj_bias": (96,),
    "layers.layers.0.self_attn.out_proj.weight": (32, 32),
    "layers.layers.0.self_attn.out_proj.bias": (32,),
    "layers.layers.0.linear1.bias": (64,),
    "layers.layers.0.linear2.bias": (32,),
    "layers.layers.0.norm1.weight": (32,),
    "head.bias": (5,),
}
"""Both layers began with equal weights, which the optimizer stores once; biases of norms are zero
like other biases of 32."""
PARAMETERS = {
    "mlp-extended": {
        "0.weight": (64, 32),
        "0.bias": (64,),
        "2.weight": (64,),
        "2.bias": (64,),
        "3.weight": (32, 64),
        "3.bias": (32,),
    },
    "cnn-extended": {
        "Conv 1": (8, 3, 3, 3),
        "Conv 2": (8,),
        "Conv 3": (16, 8, 3, 3),
        "Conv 4": (16,),
        "9.weight": (4, 16),
        "9.bias": (4,),
    },
    "lstm-basic": {
        "LSTM 1": (1, 64, 8),
        "LSTM 2": (1, 64, 16),
        "LSTM 3": (1, 128),
        "head.weight": (3, 16),
        "head.bias": (3,),
    },
    "attention-extended": {
        **ENCODER,
        "MatMul 1": (32, 96),
        "MatMul 2": (32, 64),
        "MatMul 3": (64, 32),
        "MatMul 4": (32, 5),
    },
    # Weights that two layers share stay float there; only the head has 4 bits.
    "attention-int4-4": {
        **ENCODER,
        "MatMul 1": (32, 96),
        "MatMul 2": (32, 64),
        "MatMul 3": (64, 32),
    },
}
"""What a reader of these files would train. Exporters number what has no name: in order."""


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.filterwarnings("ignore")
def test_parameters_are_those_that_a_reader_finds(files: Path, name: str) -> None:
    report = onnxtrain.explain(files / f"{name}.onnx")
    shapes = {t.name: tuple(t.dims) for t in onnx.load(files / f"{name}.onnx").graph.initializer}
    counts: collections.Counter[str] = collections.Counter()
    trained = {}
    for parameter in sorted(report.parameters):
        kind = re.fullmatch(r"onnx::(\w+)_\d+", parameter)
        counts[kind[1] if kind else ""] += 1
        trained[f"{kind[1]} {counts[kind[1]]}" if kind else parameter] = shapes[parameter]
    assert trained == PARAMETERS[name]


def test_sizes_are_told_by_names() -> None:
    sizes = Sizes(99, batch=3, window=32)
    assert dimension(7, 1, sizes) == 7
    assert dimension("batch_size", 0, sizes) == 3
    assert dimension("past_sequence_length", 2, sizes) == 0
    assert dimension("past_sliding_length", 2, sizes) == 32
    assert dimension("past_sequence_length + sequence_length", 1, sizes) == 6
    assert dimension(None, 1, sizes) == 99


def test_an_empty_cache_has_the_heads_of_the_one_that_comes_back() -> None:
    feeds = {"past_key_values.0.key": np.zeros((2, 6, 0, 6), np.float16), "x": np.ones((2, 3))}
    outputs = {"present.0.key": np.zeros((2, 4, 5, 16), np.float16)}
    fitting = with_heads(feeds, outputs)
    assert fitting["past_key_values.0.key"].shape == (2, 4, 0, 16)
    assert fitting["past_key_values.0.key"].dtype == np.float16
    assert fitting["x"] is feeds["x"]


def test_rows_are_kept_by_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge([Row("a/x", "refused"), Row("b/y", "trains right")], path)
    merge([Row("a/x", "trains right")], path)
    assert [(r.file, r.verdict) for r in read(path)] == [
        ("a/x", "trains right"),
        ("b/y", "trains right"),
    ]
    assert summary(read(path)).split() == ["2", "trains", "right", "2", "files"]
