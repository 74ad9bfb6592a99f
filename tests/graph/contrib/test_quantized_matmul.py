"""Matmuls with packed weights agree with onnxruntime's kernels; the weights stay packed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.autodiff.rule_registry import USER_RULES
from onnxtrain.errors import PrepareError
from tests.graph.contrib.fused_case import Case, normal

N, K = 6, 96
RNG = np.random.default_rng(1)


def nbits(bits, block, *, k=K, points=None, group=False, bias=False):
    blocks = -(-k // block)
    packed = RNG.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8)
    scales = (0.1 + RNG.random(N * blocks)).astype(np.float32) / (1 << bits)
    zeros = None
    if points == "packed":
        zeros = RNG.integers(0, 256, N * -(-blocks * bits // 8)).astype(np.uint8)
    elif points == "float":
        zeros = (RNG.random((N, blocks)) * (1 << bits)).astype(np.float32)
    inputs = [normal(3, k), packed, scales, zeros]
    inputs.append(
        np.repeat(np.arange(blocks, dtype=np.int32), block)[:k][::-1].copy() if group else None
    )
    inputs.append(normal(N) if bias else None)
    return Case(
        "MatMulNBits",
        inputs,
        {"K": k, "N": N, "bits": bits, "block_size": block},
        constants=(1, 2, 3, 4),
        rtol=1e-4,
        atol=1e-4,
        precision=np.float32,
        fixed=(3,) if points == "float" and group else (),
    )


CASES = {
    f"{bits} bits, blocks of {block}, {points or 'no'} points": nbits(bits, block, points=points)
    for bits in (2, 4, 8)
    for block in (16, 32)
    for points in (None, "packed", "float")
    if not (bits == 8 and points == "float")
}
CASES["a short last block"] = nbits(4, 32, k=80, points="packed")
CASES["groups"] = nbits(4, 32, group=True)
CASES["groups, float points"] = nbits(4, 32, points="float", group=True)
CASES["bias"] = nbits(4, 32, bias=True)


def bnb4(kind):
    packed = RNG.integers(0, 256, N * 64 // 2).astype(np.uint8)
    absmax = (0.1 + RNG.random(N * 64 // 32)).astype(np.float32)
    return Case(
        "MatMulBnb4",
        [normal(3, 64), packed, absmax],
        {"K": 64, "N": N, "block_size": 32, "quant_type": kind},
        constants=(1, 2),
        rtol=1e-4,
        atol=1e-4,
        precision=np.float32,
    )


CASES["fp4"], CASES["nf4"] = bnb4(0), bnb4(1)


def rows(bits, points=False, table=(12, 64)):
    packed = RNG.integers(0, 256, (table[0], table[1] * bits // 8)).astype(np.uint8)
    blocks = table[1] // 32
    scales = (0.1 + RNG.random((table[0], blocks))).astype(np.float32)
    zeros = RNG.integers(0, 256, (table[0], -(-blocks * bits // 8))).astype(np.uint8)
    return Case(
        "GatherBlockQuantized",
        [packed, np.array([[1, 3], [11, 0]]), scales, zeros if points else None],
        {"bits": bits, "block_size": 32},
        constants=(0, 2, 3),
        precision=np.float32,
    )


for _bits in (4, 8):
    CASES[f"rows of {_bits} bits"] = rows(_bits)
    CASES[f"rows of {_bits} bits, points"] = rows(_bits, True)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("target", ["cpu", "portable", "wasm"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str, target: str) -> None:
    CASES[name].check_gradient(target)


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


@pytest.mark.parametrize("opset", [17, 21, 23])
def test_weights_stay_packed_where_the_runtime_has_a_kernel(opset: int) -> None:
    case = CASES["4 bits, blocks of 32, packed points"]
    model = dataclasses.replace(case, opset=opset).model()
    fused = onnxtrain.vjp(model, "x0")
    assert operators(fused)["MatMulNBits"] == operators(fused)["GatherBlockQuantized"] == 1
    assert {t.name for t in fused.graph.initializer} >= {"x1", "x2", "x3"}
    plain = onnxtrain.vjp(model, "x0", target="portable")
    assert {n.domain for n in plain.graph.node} == {""}
    assert operators(plain)["DequantizeLinear"] == 1


def test_weights_are_unpacked_only_when_their_gradient_runs() -> None:
    """A runtime would unpack constants at the start, for all layers at once."""
    graph = onnxtrain.vjp(CASES["4 bits, blocks of 32, no points"].model(), "x0").graph
    makers = {y: n for n in graph.node for y in n.output}
    (unpack,) = (n for n in graph.node if n.op_type == "GatherBlockQuantized")
    pending, seen = list(unpack.input), set()
    while pending:
        name = pending.pop()
        seen.add(name)
        pending += makers[name].input if name in makers else []
    assert "y_grad" in seen


def test_scales_are_in_memory_once(tmp_path: Path) -> None:
    """Forward and backward read them in two shapes; a runtime would copy a view of a constant."""
    n, k = 256, 512
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[rows,{k}] x, uint8[{n},{k // 32},16] w, float[{n},{k // 32}] s)
        => (float[rows,{n}] y)
        {{ y = com.microsoft.MatMulNBits<K={k}, N={n}, bits=4, block_size=32>(x, w, s) }}"""
    )
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, (n, k // 32, 16), dtype=np.uint8)
    scales = rng.random((n, k // 32), dtype=np.float32)
    for name, array in (("w", weights), ("s", scales)):
        kind = onnx.TensorProto.UINT8 if name == "w" else onnx.TensorProto.FLOAT
        tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=kind)
        tensor.raw_data = array.tobytes()
        model.graph.initializer.append(tensor)
        model.graph.input.remove(next(x for x in model.graph.input if x.name == name))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    gradients = onnxtrain.vjp(model, "x").SerializeToString()
    session: Any = onnxruntime.InferenceSession(gradients, options)
    kept = onnx.load(tmp_path / "run.onnx").graph.initializer
    floats = [t for t in kept if t.data_type == onnx.TensorProto.FLOAT]
    assert [t.name for t in floats if np.prod(t.dims) == scales.size] == ["s"]
    codes = np.stack([weights & 15, weights >> 4], -1).reshape(n, -1, 32).astype(np.float64)
    whole = ((codes - 8) * scales[..., None]).reshape(n, k)
    dy = normal(3, n)
    have = session.run(["x_grad"], {"x": normal(3, k), "y_grad": dy})[0]
    np.testing.assert_allclose(have, dy @ whole, rtol=1e-4, atol=1e-4)


def test_inputs_are_not_rounded_in_training() -> None:
    case = CASES["4 bits, blocks of 32, no points"]
    rough = dataclasses.replace(case, attributes={**case.attributes, "accuracy_level": 4})
    report = onnxtrain.explain(rough.model(), wrt="x0")
    assert any("accuracy_level 0" in line for line in report.repairs)
    gradients = onnxtrain.vjp(rough.model(), "x0")
    feeds = {**case.feeds(), "y_grad": normal(3, N)}
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    exact = onnxruntime.InferenceSession(case.model().SerializeToString())
    got, want = session.run(["y"], feeds)[0], exact.run(None, case.feeds())[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_user_rule_takes_precedence_over_the_decomposition() -> None:
    @onnxtrain.register_vjp("com.microsoft::QuickGelu")
    def quick_gelu(op, dy, x):
        return op.Mul(dy, 42.0)

    try:
        model = Case("QuickGelu", [normal(3, 4)]).model()
        model.graph.output[0].type.CopyFrom(model.graph.input[0].type)  # nobody infers it
        graph = onnxtrain.vjp(model, "x0").graph
        assert [n.domain for n in graph.node if n.op_type == "QuickGelu"] == ["com.microsoft"]
    finally:
        del USER_RULES["com.microsoft::QuickGelu"]


def test_groups_with_packed_zero_points_raise() -> None:
    """The CPU kernel ignores them and uses the middle of the range."""
    case = nbits(4, 32, points="packed", group=True)
    with pytest.raises(PrepareError, match="groups of columns together with packed zero points"):
        onnxtrain.vjp(case.model(), "x0")
    without = dataclasses.replace(case, inputs=[*case.inputs[:3], None, *case.inputs[4:]])
    results = []
    for one in (case, without):
        session = onnxruntime.InferenceSession(one.model().SerializeToString())
        results.append(np.asarray(session.run(None, one.feeds())[0]))
    np.testing.assert_allclose(*results, rtol=1e-6, err_msg="the kernel reads them: allow them")
