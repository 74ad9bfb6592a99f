"""A bias behind the sum of a product and a branch: the product takes it along."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.passes.bias_into_gemm import bias_into_gemm

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
INPUTS = "float[n,4] x, float[n,6] z, float[6,4] w, float[6] b, float[1,6] row, float[n] own"


def rewritten(body: str) -> tuple[int, Counter[str], list[np.ndarray]]:
    """Return how often the pass changed a graph, what is left, and the results of both."""
    plain = parser.parse_model(f"{HEAD}g ({INPUTS}) => (float[n,6] y) {{{body}}}")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(plain))
    changed = bias_into_gemm(model, OpBuilder(model.graph, "cpu/"))
    simplify(model)
    proto = ir.to_proto(model)
    rng = np.random.default_rng(0)
    shapes = {"x": (6, 4), "z": (6, 6), "w": (6, 4), "b": (6,), "row": (1, 6), "own": (6,)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    results = []
    for made in (plain, proto):
        session = onnxruntime.InferenceSession(made.SerializeToString())
        result = session.run(None, {x.name: feeds[x.name] for x in session.get_inputs()})[0]
        assert isinstance(result, np.ndarray)
        results.append(result)
    return changed, Counter(n.op_type for n in proto.graph.node), results


@pytest.mark.parametrize("inner", ["p, z", "z, p"])
@pytest.mark.parametrize("outer", ["q, b", "b, q"])
def test_the_product_takes_the_bias(inner: str, outer: str) -> None:
    body = f"p = Gemm<transB=1>(x, w) q = Add({inner}) r = Add({outer}) y = Relu(r)"
    changed, kinds, (want, have) = rewritten(body)
    assert changed == 1
    assert kinds == {"Gemm": 1, "Add": 1, "Relu": 1}
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "p = Gemm<transB=1>(x, w, z) q = Add(p, z) r = Add(q, b) y = Relu(r)",  # has a summand
        "p = Gemm<transB=1, alpha=2.0>(x, w) q = Add(p, z) r = Add(q, b) y = Relu(r)",
        "p = Gemm<transB=1>(x, w) q = Add(p, z) r = Add(q, row) y = Relu(r)",  # no vector
        "p = Gemm<transB=1>(x, w) q = Add(p, z) r = Add(q, b) y = Add(r, p)",  # read elsewhere
        "p = Gemm<transB=1>(x, w) q = Add(p, z) r = Add(q, b) y = Add(r, q)",
        "c = Neg(b) p = Gemm<transB=1>(x, w) q = Add(p, z) r = Add(q, c) y = Relu(r)",  # made later
        "p = Gemm<transB=1>(x, w) q = Add(p, z) r = Add(q, own) y = Relu(r)",  # as many as rows
    ],
)
def test_what_only_looks_alike_stays(body: str) -> None:
    changed, _, (want, have) = rewritten(body)
    assert changed == 0
    np.testing.assert_array_equal(have, want)
