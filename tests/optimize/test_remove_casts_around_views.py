"""remove_casts_around_views: views move 16-bit elements, with equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.layout import remove_casts_around_views

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
NUMBERS = "<int64[3] sizes = {4,2,3}, int64 one = {1}>"


def rewritten(body: str, outputs: str = "float[2,4] y") -> tuple[int, list[str]]:
    """Return how many casts went, and the nodes; results are the same bits."""
    text = f"{HEAD} g (float[2,3,4] x) => ({outputs}) {NUMBERS} {{{body}}}"
    before = parser.parse_model(text)
    onnx.checker.check_model(before, full_check=True)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before, data_prop=True))
    changed = remove_casts_around_views(model, OpBuilder(model.graph, "t/", target="cuda"))
    simplify(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    results = []
    for proto in (before, after):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session: Any = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, {"x": x}))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    return changed, [n.op_type for n in after.graph.node]


CHAIN = """
    half = Cast<to=10>(x)
    wide = Cast<to=1>(half)
    turned = Transpose<perm=[2,0,1]>(wide)
    viewed = Reshape(turned, sizes)
    part = Gather<axis=2>(viewed, one)
    short = Cast<to={to}>(part)
    back = Transpose<perm=[1,0]>(short)
    y = Cast<to=1>(back)
"""


def test_a_round_trip_vanishes() -> None:
    changed, kinds = rewritten(CHAIN.replace("{to}", "10"))
    assert changed == 1
    assert kinds == ["Cast", "Transpose", "Gather", "Transpose", "Cast"]


def test_a_cast_to_another_16_bit_type_stays() -> None:
    changed, kinds = rewritten(CHAIN.replace("{to}", "16"))
    assert changed == 0
    assert kinds.count("Cast") == 4


@pytest.mark.parametrize("between", ["Neg(turned)", "Add(turned, turned)"])
def test_arithmetic_stays_in_float32(between: str) -> None:
    body = CHAIN.replace("{to}", "10").replace(
        "viewed = Reshape(turned, sizes)", f"viewed = {between}"
    )
    changed, kinds = rewritten(body)
    assert changed == 0
    assert kinds.count("Cast") == 4


def test_float32_readers_keep_their_value() -> None:
    body = CHAIN.replace("{to}", "10") + "z = Neg(turned)"
    changed, kinds = rewritten(body, "float[2,4] y, float[4,2,3] z")
    assert changed == 1
    assert kinds.count("Transpose") == 3


def test_casts_of_one_view_share_it() -> None:
    body = CHAIN.replace("{to}", "10") + "s2 = Cast<to=10>(turned) z = Cast<to=1>(s2)"
    changed, kinds = rewritten(body, "float[2,4] y, float[4,2,3] z")
    assert changed == 2
    assert kinds.count("Transpose") == 2
