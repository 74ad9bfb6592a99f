"""split_noncontiguous_reductions: a matmul or a pooling, then a reduction."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.reductions import split_noncontiguous_reductions
from onnxtrain.runtime import session as runtime


def reduced(kind: str, batch: str, side: int, keepdims: int) -> ir.Model:
    sizes = "1, 3, 1, 1" if keepdims else "3"
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[{batch}, 3, {side}, {side}] x) => (float[{sizes}] y)
    <int64[3] axes = {{0, 2, 3}}> {{ y = {kind} <keepdims = {keepdims}> (x, axes) }}"""
    return ir.from_proto(onnx.parser.parse_model(text))


def result(model: ir.Model, side: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((5, 3, side, side)).astype(np.float32) + 1
    session = runtime.create(ir.to_proto(model).SerializeToString())
    return runtime.run(session, ["y"], {"x": x})[0]


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("batch", ["5", "N"])
@pytest.mark.parametrize(
    ("kind", "side", "first"),
    [
        ("ReduceSum", 12, "MatMul"),
        ("ReduceMean", 12, "MatMul"),
        ("ReduceSum", 7, "GlobalAveragePool"),
        ("ReduceMean", 7, "GlobalAveragePool"),
        ("ReduceMax", 12, "ReduceMax"),
    ],
)
def test_the_same_in_two_steps(kind: str, side: int, first: str, batch: str, keepdims: int) -> None:
    model = reduced(kind, batch, side, keepdims)
    wanted = result(model, side)
    assert split_noncontiguous_reductions(model, OpBuilder(model.graph, "t/", target="cuda")) == 1
    simplify(model)
    kinds = collections.Counter(n.op_type for n in model.graph)
    assert kinds[first] == (2 if first == kind else 1)
    actual = result(model, side)
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)


def test_equal_vectors_are_stored_once() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[5, 3, 12, 12] x, float[5, 4, 12, 12] z) => (float[3] y, float[4] w)
    <int64[3] axes = {0, 2, 3}>
    { y = ReduceMean <keepdims = 0> (x, axes) w = ReduceMean <keepdims = 0> (z, axes) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert split_noncontiguous_reductions(model, OpBuilder(model.graph, "t/", target="cuda")) == 2
    products = [n for n in model.graph if n.op_type == "MatMul"]
    assert len(products) == 2
    assert products[0].inputs[1] is products[1].inputs[1]
