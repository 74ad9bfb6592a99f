"""Type and shape inference of onnxruntime's quantized operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import losses
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.errors import OnnxTrainError
from tests.graph.contrib.fused_case import Case
from tests.graph.contrib.test_integer_arithmetic import CASES

POOLS = {
    "padded": {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "ceiled": {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    "last": {"kernel_shape": [2, 2], "strides": [2, 2], "channels_last": 1},
}


def _check(name: str, inputs: list, attributes: dict) -> None:
    """Compare the inferred type and shape of a node's output with the kernel's output."""
    case = Case(
        name,
        [np.asarray(a) for a in inputs],
        attributes,
        symbolic=False,
        constants=tuple(i for i, a in enumerate(inputs) if np.asarray(a).ndim == 0),
    )
    model = case.model()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    floats = name in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")
    kind = ir.DataType.FLOAT if floats else ir.DataType.UINT8
    model.graph.output[0].type.tensor_type.elem_type = int(kind)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    want = np.asarray(session.run(None, case.feeds())[0])
    # The value is not a graph output, so only inference can give it a type.
    model.graph.node.append(
        onnx.NodeProto(op_type="Identity", input=[model.graph.node[0].output[0]], output=["z"])
    )
    model.graph.node[-1].input[0] = model.graph.node[0].output[0] = "inner"
    model.graph.output[0].name = "z"
    (node,) = [n for n in load_normalized(model).graph if n.op_type == name]
    out = node.outputs[0]
    assert out.dtype == ir.DataType.from_numpy(want.dtype)
    assert out.shape is not None
    assert len(out.shape) == want.ndim
    for inferred, size in zip(out.shape, want.shape, strict=True):
        assert not isinstance(inferred, int) or inferred == size


@pytest.mark.parametrize("name", CASES)
def test_type_is_that_of_the_kernel(name: str) -> None:
    _check(name, *CASES[name])


@pytest.mark.parametrize("form", POOLS)
def test_sizes_of_pools(form: str) -> None:
    inputs, _ = CASES["QLinearAveragePool"]
    _check("QLinearAveragePool", inputs, POOLS[form])


def test_transposed_gemm() -> None:
    inputs, _ = CASES["QGemm"]
    turned = [np.ascontiguousarray(a.T) if i in (0, 3) else a for i, a in enumerate(inputs)]
    _check("QGemm", turned, {"transA": 1, "transB": 1})


def test_float_layer_before_quantized_ones_trains_with_the_hint() -> None:
    """A file of onnxruntime's quantizer in which one layer stayed in float."""
    rng = np.random.default_rng(3)

    def node(op: str, inputs: str, output: str, domain: str = "") -> onnx.NodeProto:
        return onnx.NodeProto(op_type=op, domain=domain, input=inputs.split(), output=[output])

    arrays = {
        "w": rng.standard_normal((6, 8)).astype(np.float32),
        "s": np.float32(0.05),
        "z": np.uint8(120),
        "q": rng.integers(-90, 90, (8, 4)).astype(np.int8),
        "t": np.float32(0.02),
        "o": np.int8(0),
        "b": np.arange(4, dtype=np.int32),
        "u": np.float32(0.1),
    }
    nodes = [
        node("MatMul", "x w", "a"),
        node("QuantizeLinear", "a s z", "aq"),
        node("QGemm", "aq s z q t o b u z", "gq", "com.microsoft"),
        node("QLinearConcat", "u z gq u z gq u z", "cq", "com.microsoft"),
        node("DequantizeLinear", "cq u z", "y"),
    ]
    nodes[3].attribute.append(onnx.AttributeProto(name="axis", i=1, type=onnx.AttributeProto.INT))
    kind = onnx.TensorProto.DataType.Value("FLOAT")
    model = onnx.ModelProto(
        ir_version=8,
        opset_import=[
            onnx.OperatorSetIdProto(domain="", version=17),
            onnx.OperatorSetIdProto(domain="com.microsoft", version=1),
        ],
        graph=onnx.GraphProto(
            name="net",
            node=nodes,
            initializer=[
                ir.serde.serialize_tensor(ir.Tensor(np.asarray(a), name=n))
                for n, a in arrays.items()
            ],
        ),
    )
    for name, sizes, values in (
        ("x", (5, 6), model.graph.input),
        ("y", (5, 8), model.graph.output),
    ):
        value = values.add(name=name)
        value.type.tensor_type.elem_type = kind
        for size in sizes:
            value.type.tensor_type.shape.dim.add(dim_value=size)
    with pytest.raises(OnnxTrainError, match="straight_through=True"):
        onnxtrain.build(model, loss="mse", optimizer="adamw")
    trainer = onnxtrain.Trainer(
        onnxtrain.build(
            model,
            loss=losses.LossTerm("mse", output="y"),
            optimizer="adamw:lr=1e-2",
            straight_through=True,
        )
    )
    x, target = rng.standard_normal((5, 6)).astype(np.float32), np.zeros((5, 8), np.float32)
    curve = [float(trainer.step(x=x, target=target).loss) for _ in range(20)]
    assert curve[-1] < curve[0]
