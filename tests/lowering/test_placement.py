"""The placement report of nodes that run off the GPU, and its result for training graphs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from typer.testing import CliRunner

from onnxtrain.artifacts.build import build
from onnxtrain.cli.main import app
from onnxtrain.errors import LoweringError
from onnxtrain.graph.io import save
from onnxtrain.lowering.placement import nodes_off_gpu
from tests.artifacts.models import classifier, finished, graph

FIXTURES = Path(__file__).parents[2] / "web/packages/onnxtrain/tests/fixtures/make_fixtures.py"


def fixtures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("web_fixtures", FIXTURES)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["web_fixtures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mlp", "mlp-frozen", "cnn", "transformer"])
@pytest.mark.parametrize("fixed", [False, True])
def test_training_graphs_keep_float_tensors_on_the_gpu(name: str, fixed: bool) -> None:
    model, _, options = fixtures().MODELS[name]
    options = {**options, "dims": {"batch": 8}} if fixed else options
    built = build(model(), loss="cross_entropy", metrics=["accuracy"], target="webgpu", **options)
    for role in ("train", "optimizer", "step", "eval"):
        nodes = nodes_off_gpu(built.models[role])
        assert [str(x) for x in nodes if x.moved] == []
        assert [str(x) for x in nodes if fixed] == []


@pytest.mark.parametrize("sizes", [[64, 64], [200]])
def test_missing_external_integers_are_not_read(sizes: list[int]) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (int64[64, 1] x) => (int64[64, k] y) <int64[1] ids = {1}>
    { y = Mul(x, ids) }"""
    model = parser.parse_model(text)
    tensor = model.graph.initializer[0]
    tensor.ClearField("int64_data")
    tensor.dims[:] = sizes
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    assert nodes_off_gpu(model, "cuda") == []


def test_report_lists_node_operator_and_reason() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["n", 4])
    y = op.Sign(op.Max(x, 0.0))
    n = op.Reshape(op.Cast(op.Size(y), to=ir.DataType.FLOAT), op.const([]))
    model = finished(op, y=y, n=n)
    nodes = nodes_off_gpu(model)
    assert [(x.op_type, x.moved) for x in nodes] == [
        ("Max", ("x", "Max")),
        ("Sign", ("Max", "y")),
        ("Cast", ()),
    ]
    assert str(nodes[1]) == "Sign: Sign: ort-webgpu-native has no Sign; moves Max, y"
    assert "no int64 in Cast" in str(nodes[2])
    assert nodes_off_gpu(model, "cuda") == []
    with pytest.raises(LoweringError, match="'cpu' has no GPU"):
        nodes_off_gpu(model, "cpu")


@pytest.mark.parametrize(
    ("emit", "why"),
    [
        (lambda op, x: op.MaxPool(x, kernel_shape=[2, 2], _outputs=2)[0], "MaxPool with Indices"),
        (lambda op, x: op.OneHot(op.ArgMax(x, axis=-1), 3, [0.0, 1.0]), "has no OneHot"),
        (lambda op, x: op.Cast(op.And(op.Greater(x, 0.0), op.Less(x, 1.0)), to=1), "has no And"),
        (lambda op, x: op.RandomUniformLike(x), "has no RandomUniformLike"),
        (lambda op, x: op.Cast(op.Slice(op.Greater(x, 0.0), [0], [1]), to=1), "bool in Slice"),
    ],
)
def test_unsupported_nodes_on_webgpu(emit: Any, why: str) -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, [2, 3, 4, 4])
    model = finished(op, y=emit(op, x))
    assert any(why in entry.why for entry in nodes_off_gpu(model))


def test_build_prints_the_placement(tmp_path: Path) -> None:
    save(classifier(), tmp_path / "m.onnx")
    arguments = ["build", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "art"), "--placement"]
    arguments += ["--loss", "cross_entropy", "--loss-output", "scores"]
    result = CliRunner().invoke(app, [*arguments, "--target", "web", "--steps-per-call", "2"])
    assert result.exit_code == 0, result.output
    assert "placement on webgpu, step_model.webgpu.onnx: 0 of" in result.output
    assert (tmp_path / "art" / "step_model.x2.onnx").exists()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no GPU" in str(result.exception)


def test_ids_and_labels_are_int32_on_webgpu() -> None:
    model, draw, options = fixtures().MODELS["transformer"]
    built = build(model(), loss="cross_entropy", target="webgpu", **options)
    for role in ("train", "step", "eval"):
        spec = built.manifest.model(role)
        assert spec is not None
        kinds = {t.name: t.dtype for t in spec.inputs_of("input", "target", "step")}
        assert set(kinds.values()) == {"int32"}
    assert draw(np.random.default_rng(0)).dtype == np.int64
