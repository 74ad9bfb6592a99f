"""fold_scalar_factors: fewer nodes, equal gradients."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.optimize import pipeline

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
RMS = """g (float[N,5,8] x) => (float[N,5,8] y)
  <float[8] w = {1,2,3,4,5,-6,7,8}, float eps = {1e-5}> {
    square = Mul(x, x)
    axes = Constant<value_ints=[-1]>()
    mean = ReduceMean<keepdims=1>(square, axes)
    safe = Add(mean, eps)
    root = Sqrt(safe)
    normal = Div(x, root)
    y = Mul(normal, w)
}"""


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + text)


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.fixture
def without(monkeypatch) -> object:
    """Return a function that differentiates with every pass but this one."""

    def vjp(proto: onnx.ModelProto, wrt: list[str]) -> onnx.ModelProto:
        with monkeypatch.context() as patch:
            rest = tuple(p for p in pipeline.AFTER if p.rewrite.__name__ != "fold_scalar_factors")
            patch.setattr(pipeline, "AFTER", rest)
            return onnxtrain.vjp(proto, wrt)

    return vjp


def feeds_for(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    shapes = {x.name: x.type.tensor_type.shape.dim for x in proto.graph.input}
    return {
        n: np.asarray(rng.standard_normal([d.dim_value or 3 for d in dims]), np.float32)
        for n, dims in shapes.items()
    }


def test_the_gradient_of_rms_norm_is_short(without) -> None:
    plain = model(RMS)
    short, long = onnxtrain.vjp(plain, ["x"]), without(plain, ["x"])
    counts = collections.Counter(n.op_type for n in short.graph.node)
    # g = dy w, g / s, times n, mean, times n, difference
    assert len(short.graph.node) == 6 + 6
    assert counts["Neg"] == counts["Expand"] == counts["ReduceSum"] == 0
    assert len(long.graph.node) >= len(short.graph.node) + 6
    feeds = feeds_for(short)
    got, want = run(short, feeds), run(long, feeds)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)


def test_the_exponent_of_a_square_is_folded(without) -> None:
    """As libraries of language models write it: ``x rsqrt(mean(x^2))``."""
    text = RMS.replace("square = Mul(x, x)", "square = Pow(x, two)")
    text = text.replace("normal = Div(x, root)", "r = Reciprocal(root)\n normal = Mul(x, r)")
    plain = model(text.replace("float eps", "float two = {2}, float eps"))
    short, long = onnxtrain.vjp(plain, ["x"]), without(plain, ["x"])
    numbers = {x.name for x in short.graph.initializer if not x.dims}
    scaled = [n for n in short.graph.node if n.op_type == "Mul" and "x" in n.input]
    assert scaled
    assert not [n.name for n in scaled if numbers & set(n.input)]
    feeds = feeds_for(short)
    got, want = run(short, feeds), run(long, feeds)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "a = Neg(x) b = Mul(a, c) y = Sqrt(b)",
        "a = Div(x, c) b = Mul(a, x) y = ReduceMean<keepdims=0>(b)",
        "a = Mul(x, c) b = Neg(a) e = Exp(b) y = Mul(e, a)",
        "a = ReduceMean<keepdims=1>(x) b = Sub(x, a) d = Mul(b, b) y = ReduceMean<keepdims=0>(d)",
        "a = Softplus(x) b = Sqrt(a) d = Div(x, b) y = Mul(d, b)",
        "a = Tanh(x) b = Gelu(a) d = Div(b, x) y = LogSoftmax<axis=-1>(d)",
    ],
)
def test_gradients_stay_the_same(without, body: str) -> None:
    text = f"g (float[4,6] x) => (float y) <float c = {{-0.37}}> {{ {body} }}"
    proto = model(
        text.replace("(float y)", "(float[4,6] y)" if "keepdims=0" not in body else "(float y)")
    )
    both = onnxtrain.vjp(proto, ["x"]), without(proto, ["x"])
    assert len(both[0].graph.node) <= len(both[1].graph.node)
    feeds = {n: np.asarray(np.abs(a) + 0.5) for n, a in feeds_for(both[0]).items()}
    got, want = (run(m, feeds) for m in both)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)


def test_constants_of_the_model_stay() -> None:
    """What the file multiplies by stays in the forward graph, one node each."""
    text = """g (float[4] x) => (float[4] y) <float a = {3}, float b = {5}> {
        p = Mul(x, a) y = Mul(p, b) }"""
    made = onnxtrain.vjp(model(text), ["x"])
    feeds = feeds_for(made)
    np.testing.assert_array_equal(run(made, feeds)["y"], feeds["x"] * 3 * np.float32(5))


def test_a_value_with_two_readers_keeps_its_factor(without) -> None:
    text = """g (float[4] x) => (float[4] y) {
        s = Sigmoid(x) t = Neg(s) u = Mul(t, t) v = Neg(u) y = Add(v, t) }"""
    both = onnxtrain.vjp(model(text), ["x"]), without(model(text), ["x"])
    feeds = feeds_for(both[0])
    got, want = (run(m, feeds) for m in both)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
