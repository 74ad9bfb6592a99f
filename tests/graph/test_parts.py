"""Nodes that take a tensor apart become one Split, and only those that take all of it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.autodiff.opening import open_model

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
THREE = """g (float[3,2] x, float[2,2] w) => (float[2] y)
    <int64 i = {0}, int64 j = {-2}, int64 k = {2}> {
    a = Gather<axis=0>(x, i)
    b = Gather<axis=0>(x, j)
    c = Gather<axis=0>(x, k)
    ab = Mul(a, b)
    cw = MatMul(c, w)
    y = Add(ab, cw)
}"""
SLICES = """g (float[n,4] x) => (float[n,2] y)
    <int64[1] zero = {0}, int64[1] two = {2},
     int64[1] last = {9223372036854775807}, int64[1] axis = {-1}> {
    a = Slice(x, zero, two, axis)
    b = Slice(x, two, last, axis)
    y = Mul(a, b)
}"""


def operators(text: str) -> list[str]:
    return [n.op_type for n in open_model(parser.parse_model(HEAD + text)).graph]


def test_gathers_of_every_index_become_a_split() -> None:
    assert operators(THREE)[:4] == ["Split", "Squeeze", "Squeeze", "Squeeze"]


def test_slices_that_cover_an_axis_become_a_split() -> None:
    assert operators(SLICES) == ["Split", "Mul"]


@pytest.mark.parametrize(
    "text",
    [
        THREE.replace("k = {2}", "k = {1}"),  # one place twice, one never
        SLICES.replace("two, last, axis", "zero, two, axis"),  # they overlap
        SLICES.replace("axis = {-1}", "axis = {0}"),  # a size that is not known
    ],
)
def test_others_stay(text: str) -> None:
    assert "Split" not in operators(text)


@pytest.mark.parametrize(("text", "shape"), [(THREE, (3, 2)), (SLICES, (5, 4))])
def test_gradients_are_those_of_the_parts(text: str, shape: tuple[int, ...]) -> None:
    model = parser.parse_model(HEAD + text)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    w = np.eye(2, dtype=np.float32)
    feeds = {"x": x, "w": w} if text is THREE else {"x": x}
    graph = onnxtrain.vjp(model, ["x"])
    assert "Concat" in {n.op_type for n in graph.graph.node}
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    rows = 2 if text is THREE else (5, 2)
    seed = {i.name: np.ones(rows, np.float32) for i in session.get_inputs() if i.name not in feeds}
    found = dict(
        zip(
            [o.name for o in session.get_outputs()],
            session.run(None, {**feeds, **seed}),
            strict=True,
        )
    )
    dx = next(v for n, v in found.items() if v.shape == x.shape and n != "y")
    expected = (
        np.stack([x[1], x[0], np.ones(2, np.float32)])
        if text is THREE
        else np.concatenate([x[:, 2:], x[:, :2]], axis=1)
    )
    np.testing.assert_allclose(dx, expected, rtol=1e-6)
