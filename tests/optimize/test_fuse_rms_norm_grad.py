"""Gradients of normalisations that share products with those of their weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.targets import find

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n'
NORM = "com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01>"
WEIGHTS = ("a", "b", "c", "d")
RESIDUALS = f"""g (float[n, 6] x, float[6] a, float[6] b, float[6] c, float[6] d)
    => (float[n, 6] y) {{
    na = {NORM} (x, a)
    sa = Tanh(na)
    xa = Add(x, sa)
    nb = {NORM} (xa, b)
    sb = Tanh(nb)
    xb = Add(xa, sb)
    nc = {NORM} (xb, c)
    sc = Tanh(nc)
    xc = Add(xb, sc)
    y = {NORM} (xc, d)
}}"""
TWO = f"""g (float[n, 6] x, float[6] a, float[6] b, float[6] c, float[6] d)
    => (float[n, 6] y) {{
    na = {NORM} (x, a)
    nb = {NORM} (na, b)
    nc = Mul(nb, c)
    y = Mul(nc, d)
}}"""


def drawn(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    feeds = {n: rng.standard_normal(6).astype(np.float32) for n in WEIGHTS}
    feeds["x"] = rng.standard_normal((rows, 6)).astype(np.float32)
    feeds["y_grad"] = rng.standard_normal((rows, 6)).astype(np.float32)
    return feeds


def ran(made: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(made.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    inputs = {x.name for x in session.get_inputs()}
    given = {n: a for n, a in feeds.items() if n in inputs}
    return dict(zip(names, map(np.asarray, session.run(names, given)), strict=True))


def check(text: str, wrt: tuple[str, ...] = ("x", *WEIGHTS), rows: int = 5) -> list[str]:
    """Return the operators, if the results are those without the rewrite."""
    feeds, models = drawn(rows), []
    for target in (find("cpu").without("fuse-matmul-add"), find("cpu")):
        model = parser.parse_model(HEAD + text)
        models.append(onnxtrain.vjp(model, wrt=list(wrt), outputs=["y"], target=target))
    want, have = (ran(made, feeds) for made in models)
    assert have.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(have[name], array, rtol=1e-4, atol=1e-5)
    return [n.op_type for n in models[1].graph.node]


@pytest.mark.parametrize("rows", [5, 1, 0])
def test_one_product_stands_for_a_mean(rows: int) -> None:
    kinds = check(RESIDUALS, rows=rows)
    assert "ReduceMean" not in kinds
    assert kinds.count("Split") == 1, "of the columns of all weights"
    assert kinds.count("Gemm") == 4 + 4, "a mean square and a slope each"
    assert "Expand" not in kinds, "the mean squares have a column, too"


def test_the_gradient_is_that_of_differences() -> None:
    made = onnxtrain.vjp(parser.parse_model(HEAD + RESIDUALS), wrt=["x", *WEIGHTS], outputs=["y"])
    assert "ReduceMean" not in [n.op_type for n in made.graph.node]
    feeds = drawn(5)
    gradients = ran(made, feeds)

    def loss(values: dict[str, np.ndarray]) -> float:
        x = values["x"].astype(float)
        for name in WEIGHTS:
            spread = np.sqrt((x * x).mean(axis=1, keepdims=True) + 0.01)
            normal = x / spread * values[name]
            x = normal if name == "d" else x + np.tanh(normal)
        return float((x * values["y_grad"]).sum())

    rng = np.random.default_rng(1)
    for name in ("x", *WEIGHTS):
        way = rng.standard_normal(feeds[name].shape)
        up, down = (
            loss({**feeds, name: feeds[name].astype(float) + h * way}) for h in (1e-5, -1e-5)
        )
        want = float((gradients[f"{name}_grad"] * way).sum())
        assert (up - down) / 2e-5 == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_few_normalisations_do_not_pay_for_columns() -> None:
    kinds = check(TWO)
    assert kinds.count("ReduceMean") == 2 + 2, "mean squares and slopes"
    assert "Split" not in kinds


def test_a_weight_that_is_not_trained_leaves_nothing_to_share() -> None:
    kinds = check(RESIDUALS, wrt=("x", "a"))
    assert kinds.count("ReduceMean") == 4
    assert "Split" not in kinds


def test_a_weight_that_several_share_has_one_column() -> None:
    kinds = check(RESIDUALS.replace("(xa, b)", "(xa, a)"), wrt=("x", "a", "c", "d"))
    assert "ReduceMean" not in kinds
    assert kinds.count("Gemm") == 4 + 4


def test_a_residual_that_is_spread_is_not_added_in_place() -> None:
    """One row is added to all: what comes back through it is no matrix of the same shape."""
    text = RESIDUALS.replace("float[6] d)", "float[6] d, float[1, 6] z)").replace(
        "xa = Add(x, sa)", "xa = Add(z, sa)"
    )
    model, wrt = parser.parse_model(HEAD + text), ["x", "z", *WEIGHTS]
    feeds = {**drawn(5), "z": np.random.default_rng(9).standard_normal((1, 6), np.float32)}
    have = ran(onnxtrain.vjp(model, wrt=wrt, outputs=["y"]), feeds)
    want = ran(onnxtrain.vjp(model, wrt=wrt, outputs=["y"], target="portable"), feeds)
    assert have.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(have[name], array, rtol=1e-4, atol=1e-5)
