"""fuse_swish_grad: the gradient of x * sigmoid(x)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.gelu_swish import fuse_swish_grad

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def gradient(text: str, **feeds: np.ndarray) -> tuple[list[str], np.ndarray]:
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"])
    session = onnxruntime.InferenceSession(made.SerializeToString())
    result = session.run(["x_grad"], feeds)[0]
    assert isinstance(result, np.ndarray)
    return [n.op_type for n in made.graph.node], result


@pytest.mark.parametrize("order", ["x, s", "s, x"])
def test_four_nodes_compute_the_derivative(order: str) -> None:
    text = f"g (float[n] x) => (float[n] y) {{ s = Sigmoid(x) y = Mul({order}) }}"
    x = np.array([-200, -90, -3, -0.5, 0, 0.7, 4, 90, 200], np.float32)
    dy = np.linspace(-1, 2, x.size, dtype=np.float32)
    kinds, have = gradient(text, x=x, y_grad=dy)
    wide = x.astype(np.float64)
    s = np.exp(-np.logaddexp(0, -wide))
    np.testing.assert_allclose(have, dy * (s + wide * s * (1 - s)), rtol=2e-6, atol=1e-7)
    assert sorted(kinds) == sorted(["Sigmoid", "Mul", "Sub", "Mul", "Add", "Mul"])


def test_the_sigmoid_of_another_value_stays() -> None:
    text = """g (float[n] x, float[n] z) => (float[n] y) {
        s = Sigmoid(x)
        p = Mul(z, s)
        y = Add(p, x)
    }"""
    x, z = np.array([0.3, -0.2], np.float32), np.array([2.0, 5.0], np.float32)
    dy = np.array([1.0, -1.0], np.float32)
    _, have = gradient(text, x=x, z=z, y_grad=dy)
    s = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(have, dy * (1 + z * s * (1 - s)), rtol=1e-6)


def test_recomputed_activations() -> None:
    """Copies start from ``Where(late, x, x)``, while other readers take ``x`` itself."""
    model = parser.parse_model(
        HEAD
        + """g (float[n] x, float[n] dy, bool late) => (float[n] a, float[n] dx)
        <float one = {1}> {
            held = Where(late, x, x)
            s = Sigmoid(held)
            a = Mul(x, s)
            p = Mul(dy, s)
            rest = Sub(one, s)
            t = Mul(s, rest)
            q = Mul(dy, held)
            u = Mul(q, t)
            dx = Add(p, u)
        }"""
    )
    work = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert fuse_swish_grad(work, OpBuilder(work.graph, "grad/")) == 1
    simplify(work)
    assert [n.op_type for n in work.graph].count("Mul") == 3
    x = np.array([-90, -3, -0.5, 0, 0.7, 4, 90], np.float32)
    feeds = {"x": x, "dy": np.linspace(-1, 2, x.size, dtype=np.float32), "late": np.array(True)}
    sessions: Any = [
        onnxruntime.InferenceSession(m.SerializeToString()) for m in (model, ir.to_proto(work))
    ]
    want, have = (np.stack(s.run(["a", "dx"], feeds)) for s in sessions)
    np.testing.assert_allclose(have, want, rtol=2e-6, atol=1e-7)


GATED = """g (float[n] x, float[n] u) => (float[n] y) {
    s = Sigmoid(x)
    a = Mul(x, s)
    y = Mul(ORDER)
}"""


@pytest.mark.parametrize("order", ["a, u", "u, a"])
def test_a_gate_reads_its_result(order: str) -> None:
    x = np.array([-200, -90, -3, -0.5, 0, 0.7, 4, 20, 90], np.float32)
    u = np.linspace(-2, 3, x.size, dtype=np.float32)
    dy = np.linspace(-1, 2, x.size, dtype=np.float32)
    kinds, have = gradient(GATED.replace("ORDER", order), x=x, u=u, y_grad=dy)
    wide = x.astype(np.float64)
    s = np.exp(-np.logaddexp(0, -wide))
    a = wide * s
    want = dy * u * (s + a * (1 - s))
    rounding = 4 * np.finfo(np.float32).eps * np.maximum(np.abs(a), 1)
    assert (np.abs(have - want) <= rounding * np.abs(want) + 1e-30).all(), (have, want)
    assert sorted(kinds) == sorted(["Sigmoid", *["Mul"] * 4, "Sub", "Add"])


@pytest.mark.parametrize(
    "text",
    [
        GATED.replace("float[n] u", "float[1] u").replace("ORDER", "a, u"),
        """g (float[n] x, float[n] u) => (float[n] y) {
            s = Sigmoid(x)
            a = Mul(x, s)
            h = Mul(a, u)
            y = Mul(h, u)
        }""",
    ],
    ids=["one gate for all", "a square"],
)
def test_other_gates_use_the_derivative(text: str) -> None:
    x, u = np.array([-3, 0.5, 7], np.float32), np.array([2.0], np.float32)
    u = u if "float[1] u" in text else np.array([0.3, -1.5, 2.5], np.float32)
    dy = np.array([1.0, -1.0, 0.5], np.float32)
    _, have = gradient(text, x=x, u=u, y_grad=dy)
    wide = x.astype(np.float64)
    s = 1 / (1 + np.exp(-wide))
    factor = u if "float[1] u" in text else u.astype(np.float64) ** 2
    np.testing.assert_allclose(have, dy * factor * (s + wide * s * (1 - s)), rtol=2e-6)
