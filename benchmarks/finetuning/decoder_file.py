"""A decoder of Llama's kind as onnxruntime-genai's builder writes it in int4, with drawn weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

MS = "com.microsoft"
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, by the names of its config.json."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    positions: int = 2048

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


SHAPES = {
    "smollm2-135m": Shape(49152, 576, 1536, 30, 9, 3),
    "1b": Shape(128256, 2048, 8192, 16, 32, 8),
    "tiny": Shape(8192, 64, 128, 2, 4, 2),
}
"""SmolLM2-135M, Llama-3.2-1B, and one for tests."""


class _Writer:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs[0]

    def store(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def quantised(self, name: str, outputs: int, inputs: int) -> tuple[str, str]:
        """Draw the bytes themselves: 4-bit codes with a scale for every 32 of them."""
        size = (outputs, inputs // BLOCK, BLOCK // 2)
        codes = self.rng.integers(0, 256, size, np.uint8)
        scales = np.full((outputs, inputs // BLOCK), 0.02 / 4, np.float32)
        scales *= self.rng.uniform(0.5, 1.5, scales.shape).astype(np.float32)
        return self.store(f"{name}_Q4", codes), self.store(f"{name}_scales", scales)

    def product(self, x: str, path: str, inputs: int, outputs: int, y: str = "") -> str:
        bits, scales = self.quantised(f"{path}.MatMul.weight", outputs, inputs)
        return self.multiply(x, bits, scales, inputs, outputs, y or f"/{path}/MatMul/output_0")

    def multiply(self, x: str, bits: str, scales: str, k: int, n: int, y: str) -> str:
        return self.node(
            "MatMulNBits", [x, bits, scales], [y], domain=MS,
            K=k, N=n, bits=4, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip

    def norm(self, path: str, skip: str, mixed: str) -> tuple[str, str]:
        name = self.store(f"{path}.weight", np.ones(self.shape.hidden, np.float32))
        out = f"/{path}/output_0"
        if not mixed:
            y = self.node("SimplifiedLayerNormalization", [skip, name], [out],
                          axis=-1, epsilon=1e-5, stash_type=1)  # fmt: skip
            return y, skip
        total = f"/{path}/output_3"
        self.node("SkipSimplifiedLayerNormalization", [skip, mixed, name], [out, "", "", total],
                  domain=MS, epsilon=1e-5)  # fmt: skip
        return out, total

    def block(self, i: int, skip: str, mixed: str) -> tuple[str, str]:
        s, path = self.shape, f"model.layers.{i}"
        x, skip = self.norm(f"{path}.input_layernorm", skip, mixed)
        packed = self.product(
            x, f"{path}.attn.qkv_proj", s.hidden, (s.heads + 2 * s.groups) * s.head
        )
        past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        present = [f"present.{i}.key", f"present.{i}.value"]
        mixed = self.node(
            "GroupQueryAttention",
            [packed, "", "", *past, "seqlens_k", "total_length", "cos_cache", "sin_cache"],
            [f"/{path}/attn/output_0", *present],
            domain=MS, num_heads=s.heads, kv_num_heads=s.groups, do_rotary=1,
            scale=s.head**-0.5, rotary_interleaved=0,
        )  # fmt: skip
        mixed = self.product(mixed, f"{path}.attn.o_proj", s.hidden, s.hidden)
        x, skip = self.norm(f"{path}.post_attention_layernorm", skip, mixed)
        gate, up = (
            self.product(x, f"{path}.mlp.{n}_proj", s.hidden, s.inner) for n in ("gate", "up")
        )
        sigmoid = self.node("Sigmoid", [gate], [f"/{path}/mlp/Sigmoid"])
        act = self.node("Mul", [gate, sigmoid], [f"/{path}/mlp/act"])
        inner = self.node("Mul", [act, up], [f"/{path}/mlp/Mul"])
        return skip, self.product(inner, f"{path}.mlp.down_proj", s.inner, s.hidden)


def _start(w: _Writer) -> str:
    """Append the mask's lengths, the tables of angles, and the embedding, which the head shares."""
    s = w.shape
    one = w.store("one", np.array([1], np.int64))
    w.node("ReduceSum", ["attention_mask", one], ["lengths"], keepdims=0)
    w.node("Sub", ["lengths", one], ["last"])
    w.node("Cast", ["last"], ["seqlens_k"], to=T.INT32)
    w.node("Shape", ["attention_mask"], ["mask_shape"])
    w.node("Gather", ["mask_shape", w.store("place", np.array(1, np.int64))], ["total"], axis=0)
    w.node("Cast", ["total"], ["total_length"], to=T.INT32)
    turns = 10000.0 ** (-np.arange(0, s.head, 2) / s.head)
    angles = np.outer(np.arange(s.positions), turns)
    w.store("cos_cache", np.cos(angles).astype(np.float32))
    w.store("sin_cache", np.sin(angles).astype(np.float32))
    bits, scales = w.quantised("lm_head.MatMul.weight", s.vocabulary, s.hidden)
    flat = w.store("flat", np.array([s.vocabulary, s.hidden // 2], np.int64))
    w.node("Reshape", [bits, flat], ["embed_tokens.bits"])
    return w.node("GatherBlockQuantized", ["embed_tokens.bits", "input_ids", scales], ["embedded"],
                  domain=MS, bits=4, block_size=BLOCK, gather_axis=0, quantize_axis=1)  # fmt: skip


def write(shape: Shape, path: Path, seed: int = 0) -> Path:
    """Write the model with its weights in a file beside it; return its path."""
    w = _Writer(shape, seed)
    skip, mixed = _start(w), ""
    for i in range(shape.layers):
        skip, mixed = w.block(i, skip, mixed)
    x, _ = w.norm(f"model.layers.{shape.layers}.final_norm", skip, mixed)
    w.multiply(x, "lm_head.MatMul.weight_Q4", "lm_head.MatMul.weight_scales",
               shape.hidden, shape.vocabulary, "logits")  # fmt: skip
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", T.INT64, ["batch_size", "sequence_length"])]
    inputs.append(info("attention_mask", T.INT64, ["batch_size", "total_sequence_length"]))
    sizes = ["batch_size", "sequence_length", shape.vocabulary]
    outputs = [info("logits", T.FLOAT, sizes)]
    for i in range(shape.layers):
        for part in ("key", "value"):
            cache = ["batch_size", shape.groups, "past_sequence_length", shape.head]
            inputs.append(info(f"past_key_values.{i}.{part}", T.FLOAT, cache))
            cache = ["batch_size", shape.groups, "total_sequence_length", shape.head]
            outputs.append(info(f"present.{i}.{part}", T.FLOAT, cache))
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, w.weights)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path
