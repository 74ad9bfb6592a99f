"""split_long_sums: means and sums over millions of elements equal those in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain import losses
from onnxtrain.artifacts.build import build
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.importer import prepare
from onnxtrain.optimize.reductions import split_long_sums
from onnxtrain.training import Trainer

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
MILLIONS = 1 << 22
SHAPES = [
    ("N", (MILLIONS,)),
    ("N,1", (MILLIONS, 1)),
    ("N,M", (4, MILLIONS // 4)),
    ("N,4", (MILLIONS // 4, 4)),
    ("N,3,H,W", (21, 3, 256, 256)),
    ("N,1024", (4096, 1024)),
    (f"N,{MILLIONS // 2}", (2, MILLIONS // 2)),
    ("N,2097143", (2, 2097143)),
    ("2048,2048", (2048, 2048)),
    (f"{MILLIONS}", (MILLIONS,)),
]


def reduction(op_type: str, sizes: str) -> ir.Model:
    text = f"g (float[{sizes}] x) => (float y) {{ y = {op_type} <keepdims = 0> (x) }}"
    return load(onnx.parser.parse_model(HEAD + text))


def run(model: ir.Model, x: np.ndarray) -> float:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return float(session.run(None, {"x": x})[0])


def positive(shape: tuple[int, ...]) -> np.ndarray:
    return np.square(3.5 * np.random.default_rng(2).standard_normal(shape, np.float32))


@pytest.mark.parametrize("op_type", ["ReduceMean", "ReduceSum"])
@pytest.mark.parametrize(("sizes", "shape"), SHAPES)
def test_stages_are_exact(op_type, sizes, shape):
    model = reduction(op_type, sizes)
    assert split_long_sums(model, OpBuilder(model.graph, "t/", target="cpu")) == 1
    x = positive(shape)
    exact = x.mean(dtype=np.float64) if op_type == "ReduceMean" else x.sum(dtype=np.float64)
    assert run(model, x) == pytest.approx(exact, rel=1e-6)
    assert [y.name for y in model.graph.outputs] == ["y"]


@pytest.mark.parametrize("sizes", ["64,1024", "8", "16,16,16"])
def test_short_sums_stay(sizes):
    model = reduction("ReduceMean", sizes)
    assert split_long_sums(model, OpBuilder(model.graph, "t/", target="cpu")) == 0
    assert [n.op_type for n in model.graph] == ["ReduceMean"]


def test_one_element_per_sample_stays():
    text = """g (float[N,64] x) => (float y) <int64[1] a = {1}> {
        z = ReduceMax <keepdims = 0> (x, a)  y = ReduceMean <keepdims = 0> (z) }"""
    model = prepare(load(onnx.parser.parse_model(HEAD + text))).model
    assert split_long_sums(model, OpBuilder(model.graph, "t/", target="cpu")) == 0


def test_targets_without_float64():
    for sizes in ("N", "N,M", "N,64", "N,2097143"):
        model = reduction("ReduceMean", sizes)
        split_long_sums(model, OpBuilder(model.graph, "t/", target="webgpu"))
        assert not [n for n in model.graph if n.op_type == "Cast"]


def test_other_reductions_stay():
    text = """g (float[N,M] x) => (float[1,1] y, float[N] z) <int64[1] a = {1}> {
        y = ReduceMean <keepdims = 1> (x)  z = ReduceMean <keepdims = 0> (x, a) }"""
    model = load(onnx.parser.parse_model(HEAD + text))
    assert split_long_sums(model, OpBuilder(model.graph, "t/", target="cpu")) == 0


def check_loss(shape: tuple[int, ...], sizes: str) -> None:
    text = f"g (float[{sizes}] x) => (float[{sizes}] y) <float w = {{1.5}}> {{ y = Mul(x, w) }}"
    trainer = Trainer(
        build(onnx.parser.parse_model(HEAD + text), loss=losses.MSE(), optimizer="sgd", train="w")
    )
    rng = np.random.default_rng(3)
    x, target = (rng.standard_normal(shape, np.float32) for _ in range(2))
    target += 3
    difference = (x * np.float32(1.5)).astype(np.float64) - target
    exact = np.square(difference).mean()
    assert trainer.evaluate_batch(x, target).loss == pytest.approx(exact, rel=1e-6)
    assert trainer.step(x, target).loss == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("shape", "sizes"), [((MILLIONS,), "N"), ((2048, 2048), "N,2048")])
def test_the_loss_of_millions(shape, sizes):
    check_loss(shape, sizes)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "sizes"), [((1 << 24,), "N"), ((4096, 4096), "N,M")])
def test_the_loss_of_16_millions(shape, sizes):
    check_loss(shape, sizes)
