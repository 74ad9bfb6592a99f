"""fuse_scatter_add: rows are scattered into a sum instead of into zeros."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import parser

import onnxtrain

TIED = """<ir_version: 10, opset_import: ["": 21]>
g (int64[n] x, float[9, 4] table) => (float[n, 9] y) {
    rows = Gather(table, x)
    turned = Transpose(table)
    y = MatMul(rows, turned)
}"""


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm"])
def test_tied_embeddings_have_one_gradient(target: str) -> None:
    made = onnxtrain.vjp(parser.parse_model(TIED), wrt=["table"], target=target)
    kinds = [n.op_type for n in made.graph.node]
    assert "Add" not in kinds
    assert kinds.count("ScatterND") == 1
    rng = np.random.default_rng(0)
    x = np.array([1, 3, 3, 8])
    table, dy = rng.standard_normal((9, 4)), rng.standard_normal((4, 9))
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {"x": x, "table": table.astype(np.float32), "y_grad": dy.astype(np.float32)}
    have = np.asarray(session.run(None, feeds)[1])
    t = torch.tensor(table, requires_grad=True)
    (want,) = torch.autograd.grad(t[torch.tensor(x)] @ t.T, t, torch.tensor(dy))
    np.testing.assert_allclose(have, want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        's = ScatterND <reduction = "add"> (z, i, u) t = Add(s, c) y = Mul(t, s)',
        's = ScatterND <reduction = "max"> (z, i, u) y = Add(s, c)',
        's = ScatterND <reduction = "add"> (c, i, u) y = Add(s, c)',
    ],
    ids=["read twice", "not added", "not zeros"],
)
def test_other_sums_stay(body: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[5, 2] c, int64[3, 1] i, float[3, 2] u) => (float[5, 2] y) {{
        shape = Constant <value_ints = [5, 2]> ()
        z = ConstantOfShape(shape)
        {body}
    }}"""
    made = onnxtrain.vjp(parser.parse_model(text), wrt=["c"], target="cpu")
    feeds = {
        "c": np.arange(10, dtype=np.float32).reshape(5, 2),
        "i": np.array([[0], [2], [2]]),
        "u": np.ones((3, 2), np.float32),
    }
    plain = onnxruntime.InferenceSession(parser.parse_model(text).SerializeToString())
    session = onnxruntime.InferenceSession(made.SerializeToString())
    names = {x.name for x in session.get_inputs()}
    seed = {n: np.ones((5, 2), np.float32) for n in names - feeds.keys()}
    have = session.run(["y"], {n: feeds[n] for n in names & feeds.keys()} | seed)[0]
    np.testing.assert_array_equal(np.asarray(have), np.asarray(plain.run(None, feeds)[0]))
    assert "Add" in [n.op_type for n in made.graph.node]
