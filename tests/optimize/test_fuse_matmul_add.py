"""Products of matrices that start from what would be added to them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.targets import find

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
RNG = np.random.default_rng(3)
FEEDS = {
    n: RNG.standard_normal(s).astype(np.float32)
    for n, s in {"x": (5, 4), "w": (4, 3), "v": (4, 3), "c": (5, 3), "y_grad": (5, 3)}.items()
}
IN = "g (float[n, 4] x, float[4, 3] w, float[4, 3] v, float[n, 3] c) => (float[n, 3] y)"


def run(text: str, feeds: dict[str, np.ndarray] = FEEDS) -> tuple[list[str], list[np.ndarray]]:
    """Return the operators, and the results, which are those without the rewrite."""
    results = []
    for target in (find("cpu").without("fuse-matmul-add"), "cpu"):
        made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x", "w"], target=target)
        session = onnxruntime.InferenceSession(made.SerializeToString())
        names = {x.name for x in session.get_inputs()}
        given = {n: a for n, a in feeds.items() if n in names}
        results.append([np.asarray(y) for y in session.run(None, given)])
        kinds = [n.op_type for n in made.graph.node]
    for want, have in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    return kinds, results[1]


@pytest.mark.parametrize("order", ["c, p", "p, c"])
@pytest.mark.parametrize("product", ["MatMul(x, w)", "Gemm <alpha = 0.5> (x, w)"])
def test_a_residual_is_where_the_product_starts(order: str, product: str) -> None:
    kinds, (y, *_) = run(f"{IN} {{ p = {product} y = Add({order}) }}")
    scale = 0.5 if "alpha" in product else 1.0
    want = FEEDS["c"] + scale * (FEEDS["x"].astype(float) @ FEEDS["w"])
    np.testing.assert_allclose(y, want, rtol=1e-5)
    assert "Add" not in kinds


def test_gradients_of_two_layers_are_one_sum_of_products() -> None:
    text = f"{IN} {{ p = MatMul(x, w) q = MatMul(x, v) z = Mul(p, q) y = Mul(z, c) }}"
    kinds, results = run(text)
    x, w, v, c, dy = (FEEDS[n].astype(float) for n in ("x", "w", "v", "c", "y_grad"))
    want = (dy * c * (x @ v)) @ w.T + (dy * c * (x @ w)) @ v.T
    np.testing.assert_allclose(results[1], want, rtol=1e-4, atol=1e-5)
    assert "Add" not in kinds


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, w) s = Add(p, c) y = Mul(s, p)",
        "p = MatMul(x, w) s = ReduceSum <keepdims = 1> (c) y = Add(p, s)",
        "p = Gemm(x, w, c) y = Add(p, c)",
    ],
    ids=["read twice", "broadcast", "starts from something already"],
)
def test_other_sums_stay(body: str) -> None:
    kinds, _ = run(f"{IN} {{ {body} }}")
    assert "Add" in kinds


def test_stacks_of_matrices_stay() -> None:
    text = """g (float[2, 3, 4] x, float[2, 4, 3] w, float[2, 3, 3] c) => (float[2, 3, 3] y) {
        p = MatMul(x, w)
        y = Add(p, c)
    }"""
    shapes = {"x": (2, 3, 4), "w": (2, 4, 3), "c": (2, 3, 3), "y_grad": (2, 3, 3)}
    feeds = {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    kinds, _ = run(text, feeds)
    assert "Add" in kinds
