"""narrow_cross_entropy_grad: cast first, exact at the label."""

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
from onnxtrain.optimize.cross_entropy import narrow_cross_entropy_grad

CLASSES = max(T.SCALED_COLUMNS, 4 * T.SCALED_COLUMNS_PER_RESULT)
HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def net(
    *, one: str = "1.0", reduction: str = "none", to: int = 16, end: str = "Identity(h)"
) -> str:
    return f"""g (bfloat16[3,5] x, int64[3,1] at) => (float[3,1] loss, y)
    <float one = {{{one}}}> {{
        wide = Cast<to=1>(x)
        logp = LogSoftmax<axis=1>(wide)
        loss = GatherElements<axis=1>(logp, at)
        p = Exp(logp)
        picked = GatherElements<axis=1>(p, at)
        less = Sub(picked, one)
        s = ScatterElements<axis=1, reduction="{reduction}">(p, at, less)
        h = Cast<to={to}>(s)
        y = {end}
    }}"""


def rewritten(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, int]:
    model = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    made = ir.from_proto(model)
    count = narrow_cross_entropy_grad(made, OpBuilder(made.graph, "t/", target="cuda"))
    return model, ir.to_proto(simplify(made)), count


def results(model: onnx.ModelProto, x: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    values = ReferenceEvaluator(model).run(None, {"x": x.astype(ml_dtypes.bfloat16), "at": at})
    return [np.asarray(v, np.float32) for v in values]


def test_the_cast_moves_before_the_scatter() -> None:
    rng = np.random.default_rng(0)
    x, at = 3 * rng.standard_normal((3, 5)), np.array([[4], [0], [2]])
    before, after, count = rewritten(net())
    assert count == 1
    kinds = {v.name: v.type.tensor_type.elem_type for v in after.graph.value_info}
    kinds |= {v.name: v.type.tensor_type.elem_type for v in after.graph.output}
    (scatter,) = (n for n in after.graph.node if n.op_type == "ScatterElements")
    assert kinds[scatter.output[0]] == onnx.TensorProto.BFLOAT16
    (loss, derivative), (new_loss, new_derivative) = results(before, x, at), results(after, x, at)
    np.testing.assert_array_equal(new_loss, loss)
    np.testing.assert_array_equal(new_derivative, derivative)


def test_a_nearly_certain_label_keeps_its_gradient() -> None:
    x, at = np.array([[9.0, 0, 0, 0, 0]] * 3), np.zeros((3, 1), np.int64)
    _, after, _ = rewritten(net())
    _, derivative = results(after, x, at)
    p = 1 / (1 + 4 * np.exp(-9.0))
    assert ml_dtypes.bfloat16(p) == 1.0
    np.testing.assert_allclose(derivative[:, 0], p - 1, rtol=2**-8)


@pytest.mark.parametrize(
    "text",
    [
        net(one="2.0"),
        net(reduction="add"),
        net(to=1),
        net(end="Neg(s)"),  # somebody reads all digits
    ],
)
def test_anything_else_stays(text: str) -> None:
    assert rewritten(text)[2] == 0


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("float32", onnx.TensorProto.FLOAT), ("bf16-mixed", onnx.TensorProto.BFLOAT16)],
)
def test_builds_for_cuda_scatter_in_16_bits(precision: str, kind: int) -> None:
    first, last = (
        ",".join(str(v) for v in np.linspace(-1, 1, n).round(2)) for n in (16, 4 * CLASSES)
    )
    text = f"""g (float[N,4] x) => (float[N,{CLASSES}] y)
    <float[4,4] v = {{{first}}}, float[4,{CLASSES}] w = {{{last}}}> {{
        h = MatMul(x, v)
        y = MatMul(h, w)
    }}"""
    artifacts = onnxtrain.build(
        parser.parse_model(HEAD + text),
        loss="cross_entropy",
        optimizer="adamw",
        target="cuda",
        precision=precision,
        dims={"N": 8},
    )
    graph = onnx.shape_inference.infer_shapes(artifacts.models["gradients"]).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    (scatter,) = (n for n in graph.node if n.op_type == "ScatterElements")
    assert types[scatter.output[0]] == kind
