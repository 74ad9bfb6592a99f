"""fold_row_subtraction: a matmul subtracts from its rows itself, with equal values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.attention_fusion import fold_row_subtraction

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
INPUTS = "float[2,3,5,4] a, float[2,3,24,4] v, float[2,3,5,1] r"
SWAPPED = "b = Transpose<perm=[0,1,3,2]>(v)"
DIFFERENCE = "p = MatMul(a, b) d = Sub(p, r) y = Neg(d)"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "COALESCED_BROADCAST_ELEMENTS", 8)


def rewritten(
    body: str, inputs: str = INPUTS, outputs: str = "float[2,3,5,24] y"
) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    before = parser.parse_model(f"{HEAD} g ({inputs}) => ({outputs}) {{{body}}}")
    onnx.checker.check_model(before, full_check=True)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before, data_prop=True))
    changed = fold_row_subtraction(model, OpBuilder(model.graph, "t/", target="cuda"))
    simplify(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    return changed, before, after


def results(proto: onnx.ModelProto) -> list[np.ndarray]:
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    feeds = {x.name: rng.standard_normal(x.shape).astype(np.float32) for x in session.get_inputs()}
    return session.run(None, feeds)


@pytest.mark.parametrize(
    ("body", "inputs", "last"),
    [
        (SWAPPED + DIFFERENCE, INPUTS, "Transpose"),
        (
            "b = Transpose<perm=[0,2,3,1]>(v)" + DIFFERENCE,
            INPUTS.replace("2,3,24,4", "2,24,3,4"),
            "Concat",
        ),
        (DIFFERENCE, INPUTS.replace("2,3,24,4] v", "2,3,4,24] b"), "Concat"),
    ],
    ids=["turned", "turned with heads", "as it is"],
)
def test_rows_are_subtracted_inside(body: str, inputs: str, last: str) -> None:
    changed, before, after = rewritten(body, inputs)
    assert changed == 1
    (product,) = (n for n in after.graph.node if n.op_type == "MatMul")
    makers = {y: n.op_type for n in after.graph.node for y in n.output}
    assert makers[product.input[1]] == last, "onnxruntime reads a turned operand as it is"
    for a, b in zip(results(before), results(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        ("p = MatMul(a, b) d = Sub(r, p) y = Neg(d)", INPUTS, "float[2,3,5,24] y"),
        (DIFFERENCE + " z = Neg(p)", INPUTS, "float[2,3,5,24] y, float[2,3,5,24] z"),
        (DIFFERENCE, INPUTS.replace("5,1", "1,24"), "float[2,3,5,24] y"),
        (DIFFERENCE, INPUTS.replace("2,3,5,1", "2,1,5,1"), "float[2,3,5,24] y"),
        (DIFFERENCE, INPUTS.replace("2,3,24,4", "1,1,24,4"), "float[2,3,5,24] y"),
        (DIFFERENCE, INPUTS.replace("24", "23"), "float[2,3,5,23] y"),
        (DIFFERENCE, INPUTS.replace("2,3,", "n,3,"), "float[n,3,5,24] y"),
    ],
    ids=["the other way", "read twice", "columns", "few rows", "few products", "narrow", "unknown"],
)
def test_similar_graphs_stay(body: str, inputs: str, outputs: str) -> None:
    changed, _, after = rewritten(SWAPPED + body, inputs, outputs)
    assert changed == 0
    assert "Concat" not in {n.op_type for n in after.graph.node}


def rounded(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers with 10 bits behind the first, as products on a GPU may read them."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def test_subtracted_values_are_not_rounded_to_tf32() -> None:
    _, _, after = rewritten(SWAPPED + DIFFERENCE)
    (product,) = (n for n in after.graph.node if n.op_type == "MatMul")
    after.graph.output.extend(
        onnx.ValueInfoProto(name=x, type=after.graph.input[0].type) for x in product.input
    )
    for y in after.graph.output[1:]:
        y.type.tensor_type.ClearField("shape")
    y, a, b = results(after)
    rng = np.random.default_rng(0)
    _, _, r = (
        rng.standard_normal([2, 3, *d]).astype(np.float32) for d in ((5, 4), (24, 4), (5, 1))
    )
    inside = rounded(a[..., 4:]).astype(np.float64) @ rounded(b[..., 4:, :]).astype(np.float64)
    assert y.shape == inside.shape
    np.testing.assert_allclose(inside, np.broadcast_to(-r, inside.shape), rtol=2.0**-18)
    assert (np.abs(rounded(r) - r) > np.abs(r) * 2.0**-13).any(), "one column would not do"
