"""Adapters of each kind of layer: output, module name and merging."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.adapters.layers import find_base_layers, frozen_weight
from tests.adapters.decoders import quantized
from tests.adapters.test_files import run
from tests.adapters.test_gradients import drawn

RNG = np.random.default_rng(6)
K, N = 32, 24
WEIGHT = (RNG.standard_normal((K, N)) * 0.2).astype(np.float32)
BIAS = RNG.standard_normal(N).astype(np.float32)
X = RNG.standard_normal((3, K)).astype(np.float32)
HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'


def net(body: str, opset: int = 21, x: str = f"float[M,{K}] x", **tensors: np.ndarray):
    """Return a model with one layer; ``__`` in names becomes a dot."""
    text = HEAD.replace("{opset}", str(opset)) + f"g ({x}) => (float[M,{N}] y) {{ {body} }}"
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("__", ".")
    for name, array in tensors.items():
        stored = ir.Tensor(array, name=name.replace("__", "."))
        model.graph.initializer.append(ir.serde.serialize_tensor(stored))
    return model


def int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = (np.abs(weight).max(0) / 127).astype(np.float32)
    return np.round(weight / scale).astype(np.int8), scale


def bnb4(weight: np.ndarray) -> dict[str, np.ndarray]:
    """Return random codes and scales."""
    codes = RNG.integers(0, 256, weight.size // 2).astype(np.uint8)
    return {
        "fc__weight_Bnb4": codes,
        "absmax": RNG.uniform(0.1, 0.4, weight.size // 64).astype("f"),
    }


PACKED, SCALES, _ = quantized(np.ascontiguousarray(WEIGHT.T))
NARROW, STEP = int8(WEIGHT)
LAYERS = {
    "MatMul": net("y = MatMul(x, fc__weight)", fc__weight=WEIGHT),
    "turned": net(
        "t = Transpose <perm = [1,0]> (fc__weight) y = MatMul(x, t)", fc__weight=WEIGHT.T.copy()
    ),
    "Gemm": net("y = Gemm <alpha = 0.5, beta = 2.0> (x, fc__weight, b)", fc__weight=WEIGHT, b=BIAS),
    "Gemm-turned": net(
        "y = Gemm <transB = 1> (x, fc__weight, b)", fc__weight=WEIGHT.T.copy(), b=BIAS
    ),
    "MatMulNBits": net(
        f"y = com.microsoft.MatMulNBits <K={K}, N={N}, bits=4, block_size=32> "
        "(x, fc__weight_Q4, scales, , , b)",
        fc__weight_Q4=PACKED,
        scales=SCALES,
        b=BIAS,
    ),
    "MatMulBnb4": net(
        f"y = com.microsoft.MatMulBnb4 <K={K}, N={N}, block_size=64, quant_type=1> "
        "(x, fc__weight_Bnb4, absmax)",
        **bnb4(WEIGHT),
    ),
    "DequantizeLinear": net(
        "w = DequantizeLinear <axis = 1> (fc__weight_quantized, scale) y = MatMul(x, w)",
        fc__weight_quantized=NARROW,
        scale=STEP,
    ),
    "opset-11": net("y = MatMul(x, fc__weight)", opset=11, fc__weight=WEIGHT),
    "joined": net(
        "w = Concat <axis = 1> (a__weight, b__weight) y = MatMul(x, w)",
        a__weight=WEIGHT[:, :16].copy(),
        b__weight=WEIGHT[:, 16:].copy(),
    ),
}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", LAYERS)
def test_branch_output_equals_the_formula(name, dora):
    model = LAYERS[name]
    adapted = drawn(onnxtrain.lora(model, rank=2, alpha=3, targets="all-linear", dora=dora))
    assert [a.module for a in adapted.adapters] == (["a", "b"] if name == "joined" else ["fc"])
    (layer,) = find_base_layers(adapted.plain.graph)
    frozen, values = frozen_weight(layer), adapted.parameters
    offset = run(adapted.plain, {"x": np.zeros((1, K), np.float32)}, output="y")
    np.testing.assert_allclose(
        run(adapted.plain, {"x": X}, output="y"), X @ frozen + offset, atol=1e-5
    )
    turned = frozen + 1.5 * np.concatenate(
        [values[a.a] @ values[a.b] for a in adapted.adapters], axis=1
    )
    if dora:
        lengths = np.concatenate([values[a.magnitude] for a in adapted.adapters if a.magnitude])
        turned = turned * lengths / np.linalg.norm(turned, axis=0)
    want = X @ turned + offset
    np.testing.assert_allclose(run(adapted.model, {"x": X}, output="y"), want, atol=2e-5)
    if not (dora and name in ("MatMulNBits", "MatMulBnb4", "DequantizeLinear")):
        np.testing.assert_allclose(
            run(adapted.merge().model, {"x": X}, output="y"), want, atol=2e-5
        )


@pytest.mark.parametrize("name", LAYERS)
def test_branches_train(name):
    adapted = onnxtrain.lora(LAYERS[name], rank=2, targets="all-linear")
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss="mse", optimizer="adamw"))
    (given,) = (n for n in trainer.inputs if n != "x")
    feeds = {"x": X, given: np.ones((3, N), np.float32)}
    losses = [float(trainer.step(**feeds).loss) for _ in range(4)]
    assert losses[3] < losses[0]
    assert {p.name for p in trainer.manifest.parameters} == set(adapted.names)


def test_quantized_embeddings():
    data, scales, rounded = quantized(np.ascontiguousarray(np.pad(WEIGHT.T, ((0, 0), (0, 0)))))
    model = net(
        "z = com.microsoft.GatherBlockQuantized <bits=4, block_size=32, gather_axis=0, "
        "quantize_axis=1> (table__weight_Q4, x, scales) y = MatMul(z, w)",
        x="int64[M] x",
        table__weight_Q4=data.reshape(N, K // 2),
        scales=scales,
        w=WEIGHT,
    )
    adapted = drawn(onnxtrain.lora(model, rank=2, alpha=2, targets="table"))
    (a,) = adapted.adapters
    assert (a.module, a.kind, a.inputs, a.outputs) == ("table", "embedding", N, K)
    rows = np.array([3, 0, 23])
    values = adapted.parameters
    want = (rounded + values[a.a] @ values[a.b])[rows] @ WEIGHT
    np.testing.assert_allclose(run(adapted.model, {"x": rows}, output="y"), want, atol=2e-5)


def test_files_in_16_bits_train_and_are_merged_in_16_bits():
    half = WEIGHT.astype(np.float16)
    ends = f"float16[M,{K}] x) => (float16[M,{N}] y"
    model = onnx.parser.parse_model(
        HEAD.replace("{opset}", "21") + f"g ({ends}) {{ y = MatMul(x, w) }}"
    )
    model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(half, name="w")))
    adapted = drawn(onnxtrain.lora(model, rank=2, targets="all-linear"))
    assert {v.dtype for v in adapted.parameters.values()} == {np.dtype(np.float16)}
    x = X.astype(np.float16)
    merged = adapted.merge().model
    assert merged.graph.initializers["w"].dtype == ir.DataType.FLOAT16
    np.testing.assert_allclose(
        run(merged, {"x": x}, output="y"), run(adapted.model, {"x": x}, output="y"), atol=3e-2
    )


@pytest.mark.parametrize(
    ("node", "weight", "bias", "module"),
    [
        (
            "/model/layers.0/attn/q_proj/MatMul_Q4",
            "model.layers.0.attn.q_proj.MatMul.weight",
            "",
            "model.layers.0.self_attn.q_proj",
        ),
        (
            "/bert/encoder/layer.0/attention/self/query/MatMul",
            "onnx::MatMul_302",
            "",
            "bert.encoder.layer.0.attention.self.query",
        ),
        ("node_MatMul_3", "encoder.layers.0.fc1.weight", "", "encoder.layers.0.fc1"),
        ("node_MatMul_3", "val_12", "encoder.layers.0.fc1.bias", "encoder.layers.0.fc1"),
        ("model/layers.0/mlp/up_proj/MatMul_node_27", "val_3", "", "model.layers.0.mlp.up_proj"),
        (
            "transformer/h.0/attn/c_attn/Gemm",
            "transformer.h.0.attn.c_attn.weight",
            "",
            "transformer.h.0.attn.c_attn",
        ),
        ("", "kernel", "", "kernel"),
    ],
)
def test_names_of_modules(node, weight, bias, module):
    model = net("z = MatMul(x, w) y = Add(z, b)", w=WEIGHT, b=BIAS)
    model.graph.node[0].name = node
    for tensor, name in zip(model.graph.initializer, (weight, bias or "offset"), strict=True):
        for one in model.graph.node:
            one.input[:] = [name if n == tensor.name else n for n in one.input]
        tensor.name = name
    (layer,) = find_base_layers(onnxtrain.load(model).graph)
    assert layer.module == module


def test_a_shared_bias_names_no_layer():
    model = net(
        "p = MatMul(x, v) q = Add(p, first__bias) r = MatMul(q, w) y = Add(r, first__bias)",
        v=RNG.standard_normal((K, N)).astype("f"),
        w=RNG.standard_normal((N, N)).astype("f"),
        first__bias=BIAS,
    )
    for node, name in zip(model.graph.node, ("/a/MatMul", "", "/b/MatMul", ""), strict=True):
        node.name = name
    assert [layer.module for layer in find_base_layers(onnxtrain.load(model).graph)] == ["a", "b"]
