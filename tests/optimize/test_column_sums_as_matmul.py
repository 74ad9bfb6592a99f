"""column_sums_as_matmul: 16-bit column sums are matmuls with ones on CUDA."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.reductions import column_sums_as_matmul
from onnxtrain.targets import TARGETS

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MEMORY_BOUND_ELEMENTS", 64)


def graph(
    axes: str = "0, 1", kind: str = "bfloat16", x: str = "2,8,16", y: str = "16", keep: int = 0
) -> str:
    count = len(axes.split(","))
    return f"""g ({kind}[{x}] x) => ({kind}[{y}] y) <int64[{count}] a = {{{axes}}}>
    {{ y = ReduceSum<keepdims={keep}>(x, a) }}"""


def rewritten(text: str) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    model = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    made = ir.from_proto(model)
    count = column_sums_as_matmul(made, OpBuilder(made.graph, "t/", target="cuda"))
    return count, model, ir.to_proto(simplify(made))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("axes", "keep", "x", "y"),
    [
        ("0, 1", 0, "2,8,16", "16"),
        ("-2, -3", 1, "2,8,16", "1,1,16"),
        ("0", 0, "24,8", "8"),
    ],
)
def test_sums_keep_their_values(axes: str, keep: int, x: str, y: str, kind: str) -> None:
    count, before, after = rewritten(graph(axes, kind, x, y, keep))
    assert count == 1
    assert "MatMul" in {n.op_type for n in after.graph.node}
    onnx.checker.check_model(after, full_check=True)
    dtype = np.float16 if kind == "float16" else ml_dtypes.bfloat16
    sizes = [int(d) for d in x.split(",")]
    # Small whole numbers, of which sums are exact in 16 bits in any order.
    feeds = {"x": np.random.default_rng(0).integers(-3, 4, sizes).astype(dtype)}
    wanted, actual = (
        np.asarray(y)
        for model in (before, after)
        for y in ReferenceEvaluator(model).run(None, feeds)
    )
    assert actual.shape == wanted.shape
    np.testing.assert_array_equal(actual.astype("f4"), wanted.astype("f4"))
    np.testing.assert_array_equal(
        actual.astype("f4").ravel(), feeds["x"].astype("f4").reshape(-1, sizes[-1]).sum(0)
    )


@pytest.mark.parametrize(
    "text",
    [
        graph(kind="float"),
        graph("2", y="2,8"),
        graph("0", y="8,16"),
        graph(x="2,8,15", y="15"),
        graph(x="1,9,16"),
        graph(x="1,2,16"),
        graph(x="n,8,16"),
    ],
    ids=["float32", "rows", "one-axis", "odd-columns", "odd-rows", "small", "unknown"],
)
def test_other_sums_stay(text: str) -> None:
    count, before, after = rewritten(text)
    assert count == 0
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]


def test_one_vector_of_ones() -> None:
    text = """g (bfloat16[8,16] x, bfloat16[8,16] z) => (bfloat16[16] y) <int64[1] a = {0}> {
        s = ReduceSum<keepdims=0>(x, a) t = ReduceSum<keepdims=0>(z, a) y = Add(s, t)
    }"""
    count, _, after = rewritten(text)
    assert count == 2
    ones = {n.input[0] for n in after.graph.node if n.op_type == "MatMul"}
    assert len(ones) == 1


def test_only_targets_with_the_preference() -> None:
    assert [t for t, v in TARGETS.items() if v.prefers("column-sums-as-matmul")] == ["cuda"]
