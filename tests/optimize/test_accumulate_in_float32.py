"""accumulate_in_float32: 16-bit sums over rows run in float32 and keep their values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

import onnxtrain
from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.reductions import accumulate_in_float32

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
HALF = "bfloat16"


def rewritten(text: str) -> tuple[onnx.ModelProto, int]:
    model = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    made = ir.from_proto(model)
    count = accumulate_in_float32(made, OpBuilder(made.graph, "t/", target="cuda"))
    return ir.to_proto(simplify(made)), count


def summed(text: str) -> list[int]:
    """Return the types of what is summed."""
    proto, _ = rewritten(text)
    types = {
        v.name: v.type.tensor_type.elem_type
        for v in onnx.shape_inference.infer_shapes(proto).graph.value_info
    }
    types |= {v.name: v.type.tensor_type.elem_type for v in proto.graph.input}
    return [types[n.input[0]] for n in proto.graph.node if n.op_type == "ReduceSum"]


def net(rows: int, first: str = "Neg(x)", axes: str = "0, 1") -> str:
    kind = "float" if first.startswith("Cast") else HALF
    left = {"0, 1": "4", "2": f"{rows},2"}[axes]
    return f"""g ({kind}[{rows},2,4] x) => (float[{left}] y)
    <int64[{len(axes.split(","))}] a = {{{axes}}}> {{
        h = {first}
        s = ReduceSum<keepdims=0>(h, a)
        y32 = Cast<to=1>(s)
        y = Neg(y32)
    }}"""


@pytest.mark.parametrize(
    ("text", "types"),
    [
        (net(T.FLOAT32_ACCUMULATION_ROWS), [onnx.TensorProto.FLOAT]),
        (net(4), [onnx.TensorProto.BFLOAT16]),
        (net(4, "Cast<to=16>(x)"), [onnx.TensorProto.FLOAT]),
        (net(T.FLOAT32_ACCUMULATION_ROWS, axes="2"), [onnx.TensorProto.BFLOAT16]),
    ],
)
def test_sums_over_many_rows_or_casts_run_in_float32(text: str, types: list[int]) -> None:
    assert summed(text) == types


def test_other_readers_get_the_rounded_sum() -> None:
    text = f"""g (float[3,4] x) => (float[4] y, {HALF}[4] z) <int64[1] a = {{0}}> {{
        h = Cast<to=16>(x)
        s = ReduceSum<keepdims=0>(h, a)
        w = Cast<to=1>(s)
        y = Neg(w)
        z = Neg(s)
    }}"""
    proto, count = rewritten(text)
    assert count == 1
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    y, z = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(y), -x.sum(0), rtol=1e-6)
    want = -x.sum(0).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(z).astype(np.float32), want)


def test_the_gradient_of_a_wide_bias_is_a_float32_sum() -> None:
    text = """g (float[N,64,4] x) => (float[n,o] y) <float[4,6] w = {0}, float[6] b = {0}> {
        p = MatMul(x, w)
        h = Add(p, b)
        r = Relu(h)
        shape = Constant<value_ints=[-1, 6]>()
        y = Reshape(r, shape)
    }"""
    text = text.replace("w = {0}", "w = {" + ",".join(["0.5"] * 24) + "}")
    text = text.replace("b = {0}", "b = {" + ",".join(["0.1"] * 6) + "}")
    made = onnxtrain.build(
        parser.parse_model(HEAD + text),
        loss="cross_entropy",
        optimizer="adamw",
        target="cuda",
        precision="bf16-mixed",
        dims={"N": 512},
    )
    graph = onnx.shape_inference.infer_shapes(made.models["gradients"]).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    sums = [n for n in graph.node if n.op_type == "ReduceSum" and n.input[0] in types]
    assert sums
    assert onnx.TensorProto.BFLOAT16 not in {types[n.input[0]] for n in sums}
