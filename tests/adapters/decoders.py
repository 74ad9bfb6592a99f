"""Small decoders in the format of onnxruntime-genai's builder: packed QKV, fused norms, int4."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

MS = "com.microsoft"
VOCABULARY, HIDDEN, INNER, LAYERS = 48, 64, 96, 2
HEADS, GROUPS, HEAD = 4, 2, 16
BLOCK = 32


@dataclasses.dataclass
class Decoder:
    """A file and its dequantized weights, [outputs, inputs], by torch's names."""

    path: Path
    weights: dict[str, np.ndarray]
    int4: bool


class _Graph:
    def __init__(self, *, int4: bool) -> None:
        self.int4 = int4
        self.nodes: list[ir.Node] = []
        self.values: dict[str, ir.Value] = {}
        self.initializers: list[ir.Value] = []
        self.weights: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(3)

    def value(self, name: str) -> ir.Value | None:
        if not name:
            return None
        return self.values.setdefault(name, ir.Value(name=name))

    def node(self, op: str, inputs: list[str], outputs: list[str], name: str, **attributes: Any):
        domain = attributes.pop("domain", "")
        self.nodes.append(
            ir.Node(
                domain,
                op,
                [self.value(n) for n in inputs],
                ir.convenience.convert_attributes(attributes),
                outputs=[self.value(n) or ir.Value() for n in outputs],
                name=name,
            )
        )

    def store(self, name: str, array: np.ndarray) -> str:
        value = self.value(name)
        assert value is not None
        value.const_value = ir.Tensor(array, name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
        self.initializers.append(value)
        return name

    def drawn(self, outputs: int, inputs: int) -> np.ndarray:
        return (self.rng.standard_normal((outputs, inputs)) * 0.15).astype(np.float32)

    def product(self, x: str, path: str, weight: np.ndarray) -> np.ndarray:
        """Append a MatMul or MatMulNBits as the builder does; return its dequantized weight."""
        y = f"/{path}/MatMul/output_0"
        name = path.replace("/", ".") + ".MatMul.weight"
        if not self.int4:
            self.node("MatMul", [x, self.store(name, weight.T.copy())], [y], f"/{path}/MatMul")
            return weight
        packed, scales, rounded = quantized(weight)
        inputs = [x, self.store(f"{name}_Q4", packed), self.store(f"{name}_scales", scales)]
        n, k = weight.shape
        self.node(
            "MatMulNBits",
            inputs,
            [y],
            f"/{path}/MatMul_Q4",
            domain=MS,
            K=k,
            N=n,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )
        return rounded


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize a weight to symmetric int4 in blocks of 32; return codes, scales, dequantized."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // BLOCK, BLOCK)
    scales = (np.abs(blocks).max(-1) / 7).astype(np.float32)
    codes = np.clip(np.round(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    rounded = (codes.astype(np.float32) - 8) * scales[..., None]
    return packed, scales, rounded.reshape(n, k).astype(np.float32)


def write(folder: Path, *, int4: bool = False, family: str = "llama") -> Decoder:
    """Write a decoder with its genai_config.json; Phi-3 differs only in ``model_type``."""
    g = _Graph(int4=int4)
    w = g.weights
    w["model.embed_tokens"] = g.drawn(VOCABULARY, HIDDEN)
    table = g.store("model.embed_tokens.weight", w["model.embed_tokens"])
    g.node("Gather", [table, "input_ids"], ["embedded"], "/model/embed_tokens/Gather")
    _mask(g)
    skip, mixed = "embedded", ""
    for i in range(LAYERS):
        skip, mixed = _block(g, i, skip, mixed)
    normed, _ = _norm(g, "model.norm", "/model/layers.2/final_norm_layernorm", skip, mixed)
    w["lm_head"] = g.product(normed, "lm_head", g.drawn(VOCABULARY, HIDDEN))
    g.nodes[-1].outputs[0].name = "logits"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    _save(g, path)
    (folder / "genai_config.json").write_text(json.dumps({"model": {"type": family}}))
    return Decoder(path, w, int4)


def _mask(g: _Graph) -> None:
    one = g.store("one", np.array([1], np.int64))
    g.node("ReduceSum", ["attention_mask", one], ["lengths"], "/mask/ReduceSum", keepdims=0)
    g.node("Sub", ["lengths", one], ["last"], "/mask/Sub")
    g.node("Cast", ["last"], ["seqlens_k"], "/mask/Cast", to=6)
    g.node("Shape", ["attention_mask"], ["mask_shape"], "/mask/Shape")
    place = g.store("place", np.array(1, np.int64))
    g.node("Gather", ["mask_shape", place], ["total"], "/mask/Gather", axis=0)
    g.node("Cast", ["total"], ["total_length"], "/mask/Cast_1", to=6)
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD))
    g.store("cos_cache", np.cos(angles).astype(np.float32))
    g.store("sin_cache", np.sin(angles).astype(np.float32))


def _norm(g: _Graph, weight: str, path: str, skip: str, mixed: str) -> tuple[str, str]:
    """Append a norm of the sum; return the normed value and the sum."""
    scale = (1 + 0.1 * g.rng.standard_normal(HIDDEN)).astype(np.float32)
    g.weights[weight] = scale
    name = g.store(f"{weight}.weight", scale)
    out = f"{path}/output_0"
    if not mixed:
        g.node(
            "SimplifiedLayerNormalization",
            [skip, name],
            [out],
            f"{path}/LayerNorm",
            axis=-1,
            epsilon=1e-5,
            stash_type=1,
        )
        return out, skip
    total = f"{path}/output_3"
    g.node(
        "SkipSimplifiedLayerNormalization",
        [skip, mixed, name],
        [out, "", "", total],
        f"{path}/SkipLayerNorm",
        domain=MS,
        epsilon=1e-5,
    )
    return out, total


def _block(g: _Graph, i: int, skip: str, mixed: str) -> tuple[str, str]:
    stem, path = f"model.layers.{i}", f"model/layers.{i}"
    x, skip = _norm(g, f"{stem}.input_layernorm", f"/{path}/input_layernorm", skip, mixed)
    widths = HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD
    whole = g.product(x, f"{path}/attn/qkv_proj", g.drawn(sum(widths), HIDDEN))
    for name, part in zip("qkv", np.split(whole, np.cumsum(widths)[:2]), strict=True):
        g.weights[f"{stem}.self_attn.{name}_proj"] = part
    past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
    g.node(
        "GroupQueryAttention",
        [
            f"/{path}/attn/qkv_proj/MatMul/output_0",
            "",
            "",
            *past,
            "seqlens_k",
            "total_length",
            "cos_cache",
            "sin_cache",
        ],
        [f"/{path}/attn/output_0", f"present.{i}.key", f"present.{i}.value"],
        f"/{path}/attn/GroupQueryAttention",
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=GROUPS,
        do_rotary=1,
        scale=HEAD**-0.5,
        rotary_interleaved=0,
    )
    w = g.weights
    w[f"{stem}.self_attn.o_proj"] = g.product(
        f"/{path}/attn/output_0", f"{path}/attn/o_proj", g.drawn(HIDDEN, HEADS * HEAD)
    )
    y = f"/{path}/attn/o_proj/MatMul/output_0"
    name = f"{stem}.post_attention_layernorm"
    x, skip = _norm(g, name, f"/{path}/post_attention_layernorm", skip, y)
    for part in ("gate", "up"):
        w[f"{stem}.mlp.{part}_proj"] = g.product(
            x, f"{path}/mlp/{part}_proj", g.drawn(INNER, HIDDEN)
        )
    gate, up = (f"/{path}/mlp/{p}_proj/MatMul/output_0" for p in ("gate", "up"))
    g.node("Sigmoid", [gate], [f"{gate}.s"], f"/{path}/mlp/Sigmoid")
    g.node("Mul", [gate, f"{gate}.s"], [f"{gate}.a"], f"/{path}/mlp/act")
    g.node("Mul", [f"{gate}.a", up], [f"{gate}.m"], f"/{path}/mlp/Mul")
    w[f"{stem}.mlp.down_proj"] = g.product(
        f"{gate}.m", f"{path}/mlp/down_proj", g.drawn(HIDDEN, INNER)
    )
    return skip, f"/{path}/mlp/down_proj/MatMul/output_0"


def _save(g: _Graph, path: Path) -> None:
    def typed(name: str, dtype: ir.DataType, *dims: Any) -> ir.Value:
        value = g.value(name)
        assert value is not None
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(dims)
        return value

    ints, floats = ir.DataType.INT64, ir.DataType.FLOAT
    inputs = [
        typed("input_ids", ints, "batch", "sequence"),
        typed("attention_mask", ints, "batch", "total_sequence"),
    ]
    outputs = [g.nodes[-1].outputs[0]]
    outputs[0].type = ir.TensorType(floats)
    outputs[0].shape = ir.Shape(["batch", "sequence", VOCABULARY])
    for i in range(LAYERS):
        for part in ("key", "value"):
            inputs.append(
                typed(f"past_key_values.{i}.{part}", floats, "batch", GROUPS, "past", HEAD)
            )
            outputs.append(typed(f"present.{i}.{part}", floats, "batch", GROUPS, "total", HEAD))
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=g.nodes,
        initializers=g.initializers,
        opset_imports={"": 21, MS: 1},
        name="decoder",
    )
    model = ir.Model(graph, ir_version=10)
    proto = ir.to_proto(model)
    onnx.save(
        proto, path, save_as_external_data=True, location="model.onnx.data", size_threshold=256
    )


def batch(rows: int = 2, length: int = 6) -> dict[str, np.ndarray]:
    """Return inputs with empty caches; the second row is padded on the right."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCABULARY, (rows, length)).astype(np.int64)
    mask = np.ones((rows, length), np.int64)
    mask[1:, -2:] = 0
    empty = np.zeros((rows, GROUPS, 0, HEAD), np.float32)
    caches = {
        f"past_key_values.{i}.{part}": empty for i in range(LAYERS) for part in ("key", "value")
    }
    return {"input_ids": ids, "attention_mask": mask, **caches}
