"""Quantized arithmetic in float: within one quantization step of onnxruntime's kernels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain.autodiff.gradients import load_normalized
from tests.graph.contrib.fused_case import Case

RNG = np.random.default_rng(0)
S, Z, T = np.float32(0.05), np.uint8(120), np.float32(0.08)
A = RNG.integers(0, 256, (2, 3, 6, 6)).astype(np.uint8)
B = RNG.integers(0, 256, (2, 3, 6, 6)).astype(np.uint8)
ROWS = RNG.integers(0, 256, (4, 8)).astype(np.uint8)
WEIGHT = RNG.integers(-128, 128, (8, 5)).astype(np.int8)
KERNEL = RNG.integers(-128, 128, (4, 3, 3, 3)).astype(np.int8)
ONE = np.float32(1 / 256)
NONE = np.uint8(0)

CASES = {
    "QLinearAdd": ([A, S, Z, B, T, Z, np.float32(0.1), Z], {}),
    "QLinearMul": ([A, S, Z, B, T, Z, np.float32(0.4), Z], {}),
    "QLinearSigmoid": ([A, S, Z, ONE, NONE], {}),
    "QLinearLeakyRelu": ([A, S, Z, S, Z], {"alpha": 0.2}),
    "QLinearGlobalAveragePool": ([A, S, Z, S, Z], {}),
    "QLinearAveragePool": ([A, S, Z, S, Z], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "QLinearConcat": ([S, Z, A, S, Z, B, T, Z], {"axis": 1}),
    "QLinearSoftmax": ([ROWS, S, Z, ONE, NONE], {"axis": -1, "opset": 13}),
    "QLinearWhere": ([A > B, A, S, Z, B, T, Z, np.float32(0.1), Z], {}),
    "QGemm": (
        [
            ROWS,
            S,
            Z,
            WEIGHT,
            np.float32(0.02),
            np.int8(0),
            np.arange(5, dtype=np.int32),
            np.float32(0.3),
            Z,
        ],
        {},
    ),
    "QLinearConv": (
        [
            A,
            S,
            Z,
            KERNEL,
            np.float32(0.02),
            np.int8(0),
            np.float32(0.9),
            Z,
            np.arange(4, dtype=np.int32),
        ],
        {"pads": [1, 1, 1, 1]},
    ),
    "MatMulIntegerToFloat": ([ROWS, WEIGHT, S, np.float32(0.02), Z], {}),
    "DynamicQuantizeMatMul": (
        [RNG.standard_normal((4, 8)).astype(np.float32), WEIGHT, np.float32(0.02)],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel_to_one_step(name: str) -> None:
    inputs, attributes = CASES[name]
    floats = name in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")
    case = Case(
        name,
        [np.asarray(a) for a in inputs],
        attributes,
        symbolic=False,
        constants=tuple(i for i, a in enumerate(inputs) if np.asarray(a).ndim == 0),
    )
    model = case.model()
    if not floats:
        model.graph.output[0].type.tensor_type.elem_type = int(ir.DataType.UINT8)
    kept = ir.to_proto(load_normalized(model).model)
    assert [n.op_type for n in kept.graph.node if n.domain] == [name]  # bit for bit without it
    plain = ir.to_proto(load_normalized(model, straight_through=True).model)
    assert {n.domain for n in plain.graph.node} == {""}
    want, got = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, case.feeds())[0]
        for m in (model, plain)
    )
    if floats:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    else:
        assert got.dtype == want.dtype == np.uint8
        assert len(np.unique(want)) > 3
        assert abs(got.astype(int) - want.astype(int)).max() <= 1
