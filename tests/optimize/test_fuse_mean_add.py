"""Means of rows that take in what is added to them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.targets import find

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n'
NORM = """g (float[n, 6] x, float[6] w) => (float[n, 6] y) {
    a = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (x, w)
    b = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (a, w)
    y = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (b, w)
}"""
FEW = """g (float[n, 6] x, float[6] w) => (float[n, 6] y) {
    y = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (x, w)
}"""


def run(text: str, rows: int = 5) -> tuple[list[str], list[np.ndarray]]:
    """Return the operators, and results that are those without the rewrite; nothing is trained."""
    rng = np.random.default_rng(4)
    feeds = {
        "x": rng.standard_normal((rows, 6)).astype(np.float32),
        "w": rng.standard_normal(6).astype(np.float32),
        "y_grad": rng.standard_normal((rows, 6)).astype(np.float32),
    }
    results, kinds = [], []
    for target in (find("cpu").without("fuse-matmul-add"), find("cpu")):
        made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"], target=target)
        session = onnxruntime.InferenceSession(made.SerializeToString())
        results.append([np.asarray(y) for y in session.run(None, feeds)])
        kinds = [n.op_type for n in made.graph.node]
    for want, have in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    return kinds, [feeds["x"], feeds["w"], *results[1]]


@pytest.mark.parametrize("rows", [5, 1, 0])
def test_the_mean_square_of_a_normalisation_is_one_product(rows: int) -> None:
    kinds, (x, w, y, *_) = run(NORM, rows)
    wide = x.astype(float)
    for _ in range(3):
        wide = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 0.01) * w
    np.testing.assert_allclose(y, wide, rtol=1e-5, atol=1e-6)
    assert kinds.count("Gemm") == 3
    assert kinds.count("ReduceMean") == 3, "those of gradients stay"
    assert kinds.count("Expand") == 1, "a column that is a constant would be packed"


def test_a_column_for_few_means_is_not_worth_its_nodes() -> None:
    kinds, _ = run(FEW)
    assert "Gemm" not in kinds
    assert "Expand" not in kinds


def test_a_column_that_the_runtime_would_know_is_not_used() -> None:
    kinds, _ = run(NORM.replace("float[n, 6]", "float[5, 6]"))
    assert "Gemm" not in kinds
    assert "Pow" not in kinds


def test_a_mean_that_others_read_stays() -> None:
    text = """g (float[n, 6] x, float[6] w) => (float[n, 6] y, float[n, 1] m) {
        m = ReduceMean <keepdims = 1> (x, last)
        s = Add(m, half)
        z = Mul(x, s)
        y = Mul(z, w)
    }""".replace(
        "=> (float[n, 6] y, float[n, 1] m) {",
        "=> (float[n, 6] y, float[n, 1] m) <int64[1] last = {-1}, float half = {0.5}> {",
    )
    rng = np.random.default_rng(0)
    x, w, dy = rng.standard_normal((3, 6)), rng.standard_normal(6), rng.standard_normal((3, 6))
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"], outputs=["y"])
    assert "ReduceMean" in [n.op_type for n in made.graph.node]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {"x": x, "w": w, "y_grad": dy}
    y, mean, dx = session.run(None, {n: a.astype(np.float32) for n, a in feeds.items()})
    m = x.mean(axis=1, keepdims=True)
    g = dy * w
    np.testing.assert_allclose(np.asarray(y), x * (m + 0.5) * w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(mean), m, rtol=1e-4, atol=1e-5)
    want = g * (m + 0.5) + (g * x).sum(axis=1, keepdims=True) / 6
    np.testing.assert_allclose(np.asarray(dx), want, rtol=1e-4, atol=1e-5)
