"""Builds fail early if onnxruntime cannot load a model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.artifacts.build import build
from onnxtrain.errors import DefectError, LoadError, PrepareError
from onnxtrain.runtime import session
from onnxtrain.training import Trainer

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
PLAIN = (
    "g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1.,2.,3.,4.,5.,6.}> { y = MatMul(x, w) }"
)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def test_strings_are_refused_by_name():
    text = """g (float[N,3] x, string[N] title, string[N] other) => (float[N,2] y, string[N] z)
    <float[3,2] w = {1.,2.,3.,4.,5.,6.}> { y = MatMul(x, w)  z = Identity(title) }"""
    with pytest.raises(PrepareError, match=r"'title' \(string\), 'other' \(string\)"):
        build(parsed(text), loss="mse", optimizer="sgd")


def test_sequences_are_refused():
    model = ir.from_proto(parsed(PLAIN))
    kind = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(ir.Value(name="parts", type=kind))
    with pytest.raises(PrepareError, match=r"'parts' \(SequenceType\)"):
        build(model, loss="mse", optimizer="sgd")


def test_a_model_that_onnxruntime_cannot_load_reports_its_error(tmp_path):
    model = parsed(PLAIN)
    model.opset_import.add(domain="com.microsoft", version=1)
    node = model.graph.node.add(
        op_type="NoSuchOperator", domain="com.microsoft", input=["y"], output=["z"]
    )
    assert node.name == ""
    model.graph.output.add(name="z").type.tensor_type.elem_type = 1
    onnx.save(model, tmp_path / "odd.onnx")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(LoadError, match=r"onnxruntime cannot load this file.*NoSuchOperator"):
        build(tmp_path / "odd.onnx", loss=_loss(), optimizer="sgd")
    assert sorted(tmp_path.iterdir()) == before


def _loss() -> object:
    return onnxtrain.losses.LossTerm("mse", output="y")


def test_an_invalid_step_model_is_reported_as_a_defect_and_saved(monkeypatch):
    create = session.create

    def picky(source: bytes, **options: object) -> object:
        if onnx.load_from_string(source).graph.name == "step_model":
            raise onnxtrain.errors.OnnxTrainError("onnxruntime cannot load the model: bad fusion")
        return create(source, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "create", picky)
    with pytest.raises(DefectError, match=r"cannot load the step model.*bad fusion") as caught:
        build(parsed(PLAIN), loss="mse", optimizer="sgd")
    path = Path(re.search(r"report: (\S+)", str(caught.value))[1])  # type: ignore[index]
    kept = onnx.load(path)
    onnx.checker.check_model(kept)
    assert kept.graph.name == "step_model"
    path.unlink()
    path.parent.rmdir()
    assert build(parsed(PLAIN), loss="mse", optimizer="sgd", check=False).models


def test_without_a_runtime_nothing_is_checked(monkeypatch):
    def missing() -> None:
        raise onnxtrain.errors.MissingExtraError("onnxruntime is not installed")

    monkeypatch.setattr(session, "import_onnxruntime", missing)
    assert build(parsed(PLAIN), loss="mse", optimizer="sgd").models


def test_custom_operators_are_not_checked():
    model = parsed(PLAIN)
    model.opset_import.add(domain="com.acme", version=1)
    model.graph.node.add(op_type="Swirl", domain="com.acme", input=["y"], output=["z"])
    model.graph.output.add(name="z").type.tensor_type.elem_type = 1
    source = onnxtrain.load(model, allow_domains=["com.acme"])
    assert build(source, loss=_loss(), optimizer="sgd").models


@pytest.mark.parametrize("wide", [1, 10])
def test_normalization_between_casts(wide):
    """onnxruntime fuses these nodes and then requires inputs of equal types."""
    rng = np.random.default_rng(0)
    text = f"""g (float16[N,4,8] x) => (float16[N,4,8] y)
    <float16[8] scale, float16[8] bias, float16[8,8] w,
     float two = {{2.0}}, float eps = {{0.00001}}> {{
        h = MatMul(x, w)
        a = Cast <to = 1> (h)
        axes = Constant <value_ints = [-1]> ()
        m = ReduceMean (a, axes)
        d = Sub(a, m)
        p = Pow(d, two)
        v = ReduceMean (p, axes)
        e = Add(v, eps)
        s = Sqrt(e)
        n = Div(d, s)
        c = Cast <to = {wide}> (n)
        {
        "ws = Cast <to = 1> (scale) wb = Cast <to = 1> (bias)"
        if wide == 1
        else "ws = Identity(scale) wb = Identity(bias)"
    }
        g1 = Mul(c, ws)
        g2 = Add(g1, wb)
        y = Cast <to = 10> (g2)
    }}"""
    model = parsed(text)
    shapes = {"scale": (8,), "bias": (8,), "w": (8, 8)}
    kept = [t for t in model.graph.initializer if t.name not in shapes]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for name, shape in shapes.items():
        array = (1 + rng.standard_normal(shape) / 4).astype(np.float16)
        model.graph.initializer.append(ir.to_proto(ir.Tensor(array, name=name)))
    trainer = Trainer(
        build(model, loss="mse", optimizer="adamw:lr=0.01", train=["scale", "bias", "w"])
    )
    x = rng.standard_normal((2, 4, 8)).astype(np.float16)
    target = rng.standard_normal((2, 4, 8)).astype(np.float32)
    values = [trainer.step(x, target).loss for _ in range(10)]
    assert values[-1] < values[0]
