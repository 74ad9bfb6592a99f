"""fuse_rotary_embedding: rotations become the operator if the opset has it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.targets import find

BODY = """g (float[B,3,S,8] x, float[B,S,4] c, float[B,S,4] d) => (float[B,3,S,8] y)
    <int64[1] one = {1}> {
    c1 = Unsqueeze(c, one)
    d1 = Unsqueeze(d, one)
    minus = Neg(d1)
    cos = Concat<axis=3>(c1, c1)
    sin = Concat<axis=3>(minus, d1)
    a, b = Split<axis=3, num_outputs=2>(x)
    swapped = Concat<axis=3>(b, a)
    left = Mul(x, cos)
    right = Mul(swapped, sin)
    y = Add(left, right)
}"""


def made(opset: int, version: int, body: str = BODY, *, operator: bool = True):
    head = f'<ir_version: {version}, opset_import: ["": {opset}]>\n'
    target = find("cpu")
    target = target if operator else target.without("fuse-rotary-embedding")
    return onnxtrain.vjp(parser.parse_model(head + body), wrt=["x"], target=target)


def run(model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 5, 8), "c": (2, 5, 4), "d": (2, 5, 4), "y_grad": (2, 3, 5, 8)}
    feeds = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y", "x_grad"], feeds)  # pyright: ignore[reportReturnType]


def kinds(model) -> list[str]:
    return [n.op_type for n in model.graph.node]


def test_forward_and_gradient_are_one_node_each() -> None:
    model = made(23, 11)
    assert sorted(kinds(model)) == ["Neg", "RotaryEmbedding", "RotaryEmbedding"]
    assert next(o.version for o in model.opset_import if not o.domain) == 23
    for have, want in zip(run(model), run(made(23, 11, operator=False)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_older_opsets_keep_their_operators() -> None:
    model = made(21, 10)
    assert "RotaryEmbedding" not in kinds(model)
    assert next(o.version for o in model.opset_import if not o.domain) == 21


def test_the_gradient_can_be_differentiated_again() -> None:
    again = onnxtrain.vjp(made(23, 11), wrt=["y_grad"], outputs=["x_grad"])
    assert "x_grad_grad" in {x.name for x in again.graph.input}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Concat<axis=3>(b, a)", "Concat<axis=3>(a, b)"),
        ("Concat<axis=3>(minus, d1)", "Concat<axis=3>(d1, minus)"),
        ("Concat<axis=3>(c1, c1)", "Concat<axis=3>(c1, d1)"),
    ],
    ids=["not swapped", "the other sign", "other cosines"],
)
def test_similar_graphs_stay(old: str, new: str) -> None:
    body = BODY.replace(old, new)
    assert body != BODY
    model = made(23, 11, body)
    assert "RotaryEmbedding" not in kinds(model)
    for have, want in zip(run(model), run(made(21, 10, body)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_one_table_for_the_whole_batch() -> None:
    body = BODY.replace("float[B,S,4]", "float[1,S,4]")
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 5, 8), "c": (1, 5, 4), "d": (1, 5, 4), "y_grad": (2, 3, 5, 8)}
    feeds = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    results = []
    for operator in (True, False):
        model = made(23, 11, body, operator=operator)
        assert kinds(model).count("RotaryEmbedding") == (2 if operator else 0)
        session = onnxruntime.InferenceSession(model.SerializeToString())
        results.append([np.asarray(y) for y in session.run(["y", "x_grad"], feeds)])
    for have, want in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
