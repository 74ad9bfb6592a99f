"""A Llama decoder in the form of onnxruntime-genai's builder, with random int4 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from benchmarks.finetuning.shapes import Shape

MS = "com.microsoft"
BLOCK = 32


class _Writer:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.nodes: list[ir.Node] = []
        self.values: dict[str, ir.Value] = {}
        self.weights: list[ir.Value] = []

    def value(self, name: str) -> ir.Value:
        return self.values.setdefault(name, ir.Value(name=name))

    def node(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        node = ir.Node(
            attributes.pop("domain", ""),
            op,
            [self.value(n) if n else None for n in inputs],
            ir.convenience.convert_attributes(attributes),
            outputs=[self.value(n) if n else ir.Value(name="") for n in outputs],
            name=outputs[0],
        )
        self.nodes.append(node)
        return outputs[0]

    def store(self, name: str, array: np.ndarray) -> str:
        value = self.value(name)
        value.const_value = ir.Tensor(array, name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
        self.weights.append(value)
        return name

    def typed(self, name: str, dtype: ir.DataType, sizes: list[int | str]) -> ir.Value:
        value = self.value(name)
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(sizes)
        return value

    def quantized(self, name: str, outputs: int, inputs: int) -> tuple[str, str]:
        """Draw the bytes themselves: 4-bit codes with a scale for every 32 of them."""
        size = (outputs, inputs // BLOCK, BLOCK // 2)
        codes = self.rng.integers(0, 256, size, np.uint8)
        scales = np.full((outputs, inputs // BLOCK), 0.02 / 4, np.float32)
        scales *= self.rng.uniform(0.5, 1.5, scales.shape).astype(np.float32)
        return self.store(f"{name}_Q4", codes), self.store(f"{name}_scales", scales)

    def product(self, x: str, path: str, inputs: int, outputs: int, y: str = "") -> str:
        bits, scales = self.quantized(f"{path}.MatMul.weight", outputs, inputs)
        return self.multiply(x, bits, scales, inputs, outputs, y or f"/{path}/MatMul/output_0")

    def multiply(self, x: str, bits: str, scales: str, k: int, n: int, y: str) -> str:
        return self.node(
            "MatMulNBits",
            [x, bits, scales],
            [y],
            domain=MS,
            K=k,
            N=n,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )

    def norm(self, path: str, skip: str, mixed: str) -> tuple[str, str]:
        name = self.store(f"{path}.weight", np.ones(self.shape.hidden, np.float32))
        out = f"/{path}/output_0"
        if not mixed:
            y = self.node(
                "SimplifiedLayerNormalization",
                [skip, name],
                [out],
                axis=-1,
                epsilon=1e-5,
                stash_type=1,
            )
            return y, skip
        total = f"/{path}/output_3"
        self.node(
            "SkipSimplifiedLayerNormalization",
            [skip, mixed, name],
            [out, "", "", total],
            domain=MS,
            epsilon=1e-5,
        )
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
            domain=MS,
            num_heads=s.heads,
            kv_num_heads=s.groups,
            do_rotary=1,
            scale=s.head**-0.5,
            rotary_interleaved=0,
        )
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
    w.node("Cast", ["last"], ["seqlens_k"], to=int(ir.DataType.INT32))
    w.node("Shape", ["attention_mask"], ["mask_shape"])
    w.node("Gather", ["mask_shape", w.store("place", np.array(1, np.int64))], ["total"], axis=0)
    w.node("Cast", ["total"], ["total_length"], to=int(ir.DataType.INT32))
    turns = 10000.0 ** (-np.arange(0, s.head, 2) / s.head)
    angles = np.outer(np.arange(s.positions), turns)
    w.store("cos_cache", np.cos(angles).astype(np.float32))
    w.store("sin_cache", np.sin(angles).astype(np.float32))
    bits, scales = w.quantized("lm_head.MatMul.weight", s.vocabulary, s.hidden)
    flat = w.store("flat", np.array([s.vocabulary, s.hidden // 2], np.int64))
    w.node("Reshape", [bits, flat], ["embed_tokens.bits"])
    return w.node(
        "GatherBlockQuantized",
        ["embed_tokens.bits", "input_ids", scales],
        ["embedded"],
        domain=MS,
        bits=4,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )


def write(shape: Shape, path: Path, seed: int = 0) -> Path:
    """Write the model with its weights in a file beside it; return its path."""
    w = _Writer(shape, seed)
    skip, mixed = _start(w), ""
    for i in range(shape.layers):
        skip, mixed = w.block(i, skip, mixed)
    x, _ = w.norm(f"model.layers.{shape.layers}.final_norm", skip, mixed)
    w.multiply(
        x,
        "lm_head.MatMul.weight_Q4",
        "lm_head.MatMul.weight_scales",
        shape.hidden,
        shape.vocabulary,
        "logits",
    )
    ints, floats = ir.DataType.INT64, ir.DataType.FLOAT
    inputs = [
        w.typed("input_ids", ints, ["batch_size", "sequence_length"]),
        w.typed("attention_mask", ints, ["batch_size", "total_sequence_length"]),
    ]
    sizes: list[int | str] = ["batch_size", "sequence_length", shape.vocabulary]
    outputs = [w.typed("logits", floats, sizes)]
    for i in range(shape.layers):
        for part in ("key", "value"):
            old, new = "past_sequence_length", "total_sequence_length"
            rest = ["batch_size", shape.groups, old, shape.head]
            inputs.append(w.typed(f"past_key_values.{i}.{part}", floats, rest))
            rest = ["batch_size", shape.groups, new, shape.head]
            outputs.append(w.typed(f"present.{i}.{part}", floats, rest))
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=w.nodes,
        initializers=w.weights,
        opset_imports={"": 21, MS: 1},
        name="decoder",
    )
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path
