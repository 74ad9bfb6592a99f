"""Shape inference with sizes computed from integer initializers."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.shapes import dims_of

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
BODY = """{
    turned = Transpose<perm=[1, 0]>(pads)
    flat = Reshape(turned, all)
    z = Pad(x, flat)
    y = Mul(z, z)
}"""
INITIALIZERS = "<int64[2, 2] pads = {0, 0, 2, 1}, int64[1] all = {-1}>"
GIVEN = f"g (float[N, 8] x) => (float[N, M] y) {INITIALIZERS} {BODY}"
CONSTANT = "g (float[N, 8] x) => (float[N, M] y) " + BODY.replace(
    "{\n",
    "{\npads = Constant<value = int64[2, 2] {0, 0, 2, 1}>()\n"
    "all = Constant<value = int64[1] {-1}>()\n",
    1,
)


def sizes(text: str) -> list[object]:
    """Return the last size of each result of rank 2."""
    model = load_normalized(parser.parse_model(HEAD + text)).model
    shapes = [dims_of(y) or () for node in model.graph for y in node.outputs]
    return [dims[1] for dims in shapes if len(dims) == 2 and dims[0] == "N"]


@pytest.mark.parametrize("text", [GIVEN, CONSTANT], ids=["initializers", "constants"])
def test_computed_pads_give_static_sizes(text: str) -> None:
    assert sizes(text) == [11, 11]


@pytest.mark.parametrize("text", [GIVEN, CONSTANT], ids=["initializers", "constants"])
def test_gradient_of_computed_pads(text: str) -> None:
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"])
    assert "Transpose" not in {n.op_type for n in made.graph.node}
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(s).astype(np.float32) for s in ((3, 8), (3, 11)))
    session = onnxruntime.InferenceSession(made.SerializeToString())
    y, dx = (np.asarray(v) for v in session.run(None, {"x": x, "y_grad": dy}))
    np.testing.assert_allclose(y, np.pad(x, ((0, 0), (2, 1))) ** 2, rtol=1e-6)
    np.testing.assert_allclose(dx, 2 * x * dy[:, 2:10], rtol=1e-5)
