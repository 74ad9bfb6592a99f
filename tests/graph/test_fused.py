"""Decompositions of fused operators agree with onnxruntime's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized

B, S, HEADS, D = 2, 5, 2, 8


def r(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape) + len(shape))
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def mask() -> np.ndarray:
    return np.array([[1] * S, [1] * (S - 2) + [0] * 2], np.int32)


def rotation(size: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(16), 10000.0 ** (-np.arange(size // 2) / (size // 2)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


COS, SIN = rotation(D // HEADS)
QKV = (r(B, S, D), r(B, S + 1, D), r(B, S + 1, D))
POSITIONS = np.tile(np.arange(S), (B, 1))

CASES: dict[str, tuple[str, list[np.ndarray | None], dict[str, Any], list[str]]] = {
    "fast-gelu": ("FastGelu", [r(3, 4), r(4)], {}, ["y"]),
    "gelu": ("Gelu", [r(3, 4)], {}, ["y"]),
    "bias-gelu": ("BiasGelu", [r(3, 4), r(4)], {}, ["y"]),
    "quick-gelu": ("QuickGelu", [r(3, 4)], {"alpha": 1.3}, ["y"]),
    "fused-matmul": ("FusedMatMul", [r(3, 4, 2), r(3, 4, 5)], {"transA": 1, "alpha": 0.5}, ["y"]),
    "fused-matmul-batch": (
        "FusedMatMul",
        [r(4, 3, 2), r(3, 5, 2)],
        {"transBatchA": 1, "transB": 1},
        ["y"],
    ),
    "fused-conv": (
        "FusedConv",
        [r(1, 2, 5, 5), r(3, 2, 3, 3), r(3)],
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
        ["y"],
    ),
    "fused-conv-leaky": (
        "FusedConv",
        [r(1, 2, 5, 5), r(3, 2, 3, 3), r(3)],
        {"activation": "LeakyRelu", "activation_params": [0.2]},
        ["y"],
    ),
    "fused-gemm": (
        "FusedGemm",
        [r(3, 4), r(5, 4), r(5)],
        {"activation": "Relu", "transB": 1, "alpha": 0.5},
        ["y"],
    ),
    "skip-layer-norm": (
        "SkipLayerNormalization",
        [r(B, S, D), r(B, S, D), r(D), r(D), r(D)],
        {"epsilon": 1e-3},
        ["y", "", "", "sum"],
    ),
    "skip-simplified": (
        "SkipSimplifiedLayerNormalization",
        [r(B, S, D), r(B, S, D), r(D)],
        {},
        ["y", "", "", "sum"],
    ),
    "embed-layer-norm": (
        "EmbedLayerNormalization",
        [
            np.arange(B * S, dtype=np.int32).reshape(B, S),
            np.ones((B, S), np.int32),
            r(20, D),
            r(S + 3, D),
            r(2, D),
            r(D),
            r(D),
        ],
        {"epsilon": 1e-5},
        ["y", "m"],
    ),
    "attention": (
        "Attention",
        [r(B, S, D), r(D, 3 * D), r(3 * D), mask()],
        {"num_heads": HEADS},
        ["y"],
    ),
    "attention-causal": (
        "Attention",
        [r(B, S, D), r(D, 3 * D), r(3 * D)],
        {"num_heads": HEADS, "unidirectional": 1},
        ["y"],
    ),
    "multi-head": ("MultiHeadAttention", list(QKV), {"num_heads": HEADS}, ["y"]),
    "multi-head-bias": (
        "MultiHeadAttention",
        [r(B, S, D), r(B, S, D), r(B, S, D), r(3 * D), mask()],
        {"num_heads": HEADS, "scale": 0.3},
        ["y"],
    ),
    "rotary": (
        "RotaryEmbedding",
        [r(B, HEADS, S, D // HEADS), POSITIONS, COS, SIN],
        {},
        ["y"],
    ),
    "rotary-flat-interleaved": (
        "RotaryEmbedding",
        [r(B, S, D), POSITIONS, COS, SIN],
        {"interleaved": 1},
        ["y"],
    ),
}


def _dims(array: np.ndarray) -> list[int | str]:
    symbolic = array.ndim > 2 and array.shape[0] == B
    return ["batch", *array.shape[1:]] if symbolic else list(array.shape)


def fused_model(
    op: str,
    arrays: list[np.ndarray | None],
    attributes: Mapping[str, Any],
    outputs: list[str],
    domain: str,
) -> onnx.ModelProto:
    values = [
        None if a is None else ir.val(f"x{i}", ir.DataType.from_numpy(a.dtype), _dims(a))
        for i, a in enumerate(arrays)
    ]
    node = ir.Node(
        domain, op, values, ir.convenience.convert_attributes(attributes), num_outputs=len(outputs)
    )
    for value, name in zip(node.outputs, outputs, strict=True):
        kind = ir.DataType.INT32 if name == "m" else ir.DataType.FLOAT
        value.name, value.type = name, ir.TensorType(kind)
    graph = ir.Graph(
        [v for v in values if v is not None],
        [v for v in node.outputs if v.name and v.name not in ("m",)],
        nodes=[node],
        opset_imports={"": 21, "com.microsoft": 1},
        name="fused",
    )
    return ir.to_proto(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("name", CASES)
def test_decomposition_equals_kernel(name: str) -> None:
    op, arrays, attributes, outputs = CASES[name]
    model = fused_model(op, arrays, attributes, outputs, "com.microsoft")
    plain = ir.to_proto(load_normalized(model).model)
    assert {n.domain for n in plain.graph.node} == {""}
    feeds = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    got = onnxruntime.InferenceSession(plain.SerializeToString()).run(None, feeds)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_fused_is_differentiable(name: str) -> None:
    op, arrays, attributes, outputs = CASES[name]
    model = fused_model(op, arrays, attributes, outputs, "com.microsoft")
    wrt = [f"x{i}" for i, a in enumerate(arrays) if a is not None and a.dtype == np.float32]
    gradients = onnxtrain.vjp(model, wrt)
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    feeds = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    kept = [o.name for o in model.graph.output]
    plain = onnxruntime.InferenceSession(model.SerializeToString())
    shapes = [v.shape for v in plain.run(kept, feeds)]
    seeds = {f"{o}_grad": np.ones(s, np.float32) for o, s in zip(kept, shapes, strict=True)}
    grads = session.run([f"{w}_grad" for w in wrt], {**feeds, **seeds})
    for w, g in zip(wrt, grads, strict=True):
        assert g.shape == feeds[w].shape
        assert np.isfinite(g).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", [False, True])
def test_quantized_weights(bits: int, points: bool) -> None:
    rng = np.random.default_rng(0)
    n, k, block = 6, 48, 16
    packed = rng.integers(0, 256, (n, k // block, block * bits // 8)).astype(np.uint8)
    scales = (0.1 + rng.random((n, k // block))).astype(np.float32)
    zeros = rng.integers(0, 256, (n, -(-(k // block) * bits // 8))).astype(np.uint8)
    x = r(3, k)
    constants = {
        "b": packed,
        "s": scales.reshape(-1) if bits == 4 else scales,
        **({"z": zeros} if points else {}),
    }
    xv = ir.val("x", ir.DataType.FLOAT, ["n", k])
    inits = [
        ir.Value(
            name=key,
            type=ir.TensorType(ir.DataType.from_numpy(a.dtype)),
            shape=ir.Shape(a.shape),
            const_value=ir.Tensor(a, name=key),
        )
        for key, a in constants.items()
    ]
    node = ir.Node(
        "com.microsoft",
        "MatMulNBits",
        [xv, *inits],
        ir.convenience.convert_attributes({"K": k, "N": n, "bits": bits, "block_size": block}),
    )
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [xv],
        node.outputs,
        nodes=[node],
        initializers=inits,
        opset_imports={"": 21, "com.microsoft": 1},
        name="q",
    )
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    gradients = onnxtrain.vjp(model, "x")
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    u = r(3, n)
    got, dx = session.run(None, {"x": x, "y_grad": u})
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    weights = session.run(
        ["y"], {"x": np.eye(k, dtype=np.float32), "y_grad": np.zeros((k, n), np.float32)}
    )[0]
    np.testing.assert_allclose(dx, u @ weights.T, rtol=1e-3, atol=1e-3)


def test_shared_buffer_raises() -> None:
    model = fused_model(
        "Attention",
        [r(B, S, D), r(D, 3 * D), r(3 * D), None, r(2, B, HEADS, S, D // HEADS)],
        {"num_heads": HEADS, "past_present_share_buffer": 1},
        ["y"],
        "com.microsoft",
    )
    with pytest.raises(onnxtrain.errors.PrepareError, match="fixed-length cache buffer"):
        onnxtrain.vjp(model, "x0")
