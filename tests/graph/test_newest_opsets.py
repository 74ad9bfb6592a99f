"""Files of opset 27, 28 and of ai.onnx.preview train, and what is built runs on onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

import onnxtrain
from onnxtrain.autodiff.explain import operators
from onnxtrain.errors import PrepareError

LINEAR = "q_num_heads = 2, kv_num_heads = 2"
MODELS = {
    "SwiGLU": (
        28,
        """(float[n,8] x) => (float[n,8] z) <float[8,8] w, float[8,8] v> {
        h = MatMul (x, w)  k = MatMul (x, v)  z = SwiGLU (h, k)
        }""",
    ),
    "LinearAttention": (
        27,
        f"""(float[n,5,8] x) => (float[n,5,8] z) <float[8,8] w> {{
        q = MatMul (x, w)  z, s = LinearAttention <{LINEAR}, update_rule = "linear"> (q, x, x)
        }}""",
    ),
    "CausalConvWithState": (
        27,
        """(float[n,3,8] x) => (float[n,3,8] z, float[n,3,3] s) <float[3,1,4] w, float[3] b> {
        z, s = CausalConvWithState <activation = "silu"> (x, w, b)
        }""",
    ),
    "SpaceToDepth": (
        28,
        """(float[n,3,4,4] x) => (float[n,12,2,2] z) <float[3,1,1] w> {
        q = Mul (x, w)  z = SpaceToDepth <blocksize = 2, mode = "CRD"> (q)
        }""",
    ),
    "Celu": (
        28,
        """(float[n,3] x) => (float[n,3] z) <float[3] w> {
        q = Mul (x, w)  h = Cast <to = 16> (q)  c = Celu (h)  z = Cast <to = 1> (c)
        }""",
    ),
    "Einsum": (
        28,
        """(float[n,3] x) => (float[n,2] z) <float[3,2] w> {
        h = Cast <to = 16> (x)  v = Cast <to = 16> (w)
        c = Einsum <equation = "ij,jk->ik"> (h, v)  z = Cast <to = 1> (c)
        }""",
    ),
    "OneHot": (
        28,
        """(float[n,3] x, int64[n] i) => (float[n,3] z) <float[2] w> {
        d = Constant <value_int = 3> ()  v = Cast <to = 16> (w)
        h = OneHot (i, d, v)  f = Cast <to = 1> (h)  z = Mul (x, f)
        }""",
    ),
    "FlexAttention": (
        26,
        """(float[n,2,5,8] x) => (float[n,2,5,8] z) <float[8,8] w> {
        q = MatMul (x, w)  z = ai.onnx.preview.FlexAttention (q, x, x)
        }""",
    ),
}
EXPANDED = {"SwiGLU", "LinearAttention", "CausalConvWithState", "SpaceToDepth", "FlexAttention"}


def model_of(name: str) -> onnx.ModelProto:
    opset, body = MODELS[name]
    preview = ', "ai.onnx.preview": 1' if name == "FlexAttention" else ""
    header = f'<ir_version: 14, opset_import: ["": {opset}{preview}]> g '
    model = onnx.parser.parse_model(header + body)
    rng = np.random.default_rng(0)
    for value in list(model.graph.value_info):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = rng.standard_normal(dims).astype(np.float32)
        model.graph.initializer.append(ir.to_proto(ir.tensor(array, name=value.name)))
        model.graph.value_info.remove(value)
    return model


def inputs_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(1), {}
    for x in model.graph.input:
        dims = [d.dim_value or 4 for d in x.type.tensor_type.shape.dim]
        floats = x.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        array = rng.standard_normal(dims).astype(np.float32)
        feeds[x.name] = array if floats else rng.integers(0, 3, dims)
    return feeds


@pytest.mark.parametrize("name", MODELS)
def test_builds_trains_and_serves(name: str) -> None:
    model = model_of(name)
    artifacts = onnxtrain.build(
        model,
        loss=lambda op, y, *rest: op.ReduceMean(op.Mul(y, y), keepdims=0),
        optimizer="sgd:lr=0.01",
        train="w" if name == "OneHot" else None,  # on and off values are no weights
    )
    assert {p.name for p in artifacts.manifest.parameters} == {
        t.name for t in model.graph.initializer
    }
    feeds = inputs_of(model)
    served = artifacts.models["infer"].SerializeToString()
    result = ort.InferenceSession(served).run(["z"], feeds)[0]
    (expected, *_) = list(ReferenceEvaluator(model).run(["z"], feeds))
    tolerance = 2e-2 if name in ("Celu", "Einsum", "OneHot") else 1e-5  # bfloat16
    np.testing.assert_allclose(
        np.asarray(result), np.asarray(expected), rtol=tolerance, atol=tolerance
    )
    trainer = onnxtrain.Trainer(artifacts)
    losses = [trainer.step(**feeds).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    repairs = "\n".join(artifacts.manifest.options["repairs"])
    assert (f"expanded, because no runtime has them: {name}" in repairs) == (name in EXPANDED)


def test_old_operators_of_a_new_opset_stay() -> None:
    text = """<ir_version: 14, opset_import: ["": 28]>
    g (float[n,3] x) => (float[n,3] y) <float[3] w = {1, 2, 3}> { q = Mul (x, w)  y = Gelu (q) }"""
    artifacts = onnxtrain.build(
        onnx.parser.parse_model(text),
        loss=lambda op, y: op.ReduceSum(y, keepdims=0),
        optimizer="sgd",
    )
    served = artifacts.models["infer"]
    assert [n.op_type for n in served.graph.node] == ["Mul", "Gelu"]
    assert (served.opset_import[0].version, served.ir_version) == (26, 13)


def test_nodes_that_cannot_be_downgraded_are_named() -> None:
    text = """<ir_version: 14, opset_import: ["": 28]>
    g (float[3] x, int16[3] a) => (float[3] y) {
      b = BitShift <direction = "LEFT"> (a, a)  c = Cast <to = 1> (b)  y = Mul (x, c)
    }"""
    with pytest.raises(PrepareError, match=r"cannot be downgraded:\n.*BitShift\(a: INT16"):
        onnxtrain.vjp(onnx.parser.parse_model(text), wrt="x")


def test_every_operator_of_the_newest_opset_has_an_answer() -> None:
    for domain in ("ai.onnx", "ai.onnx.preview", "ai.onnx.preview.training"):
        reports = operators(domain)
        assert reports
        assert [o.name for o in reports if o.how == "missing"] == []
    assert {o.name: o.since for o in operators()}["SwiGLU"] == 28
