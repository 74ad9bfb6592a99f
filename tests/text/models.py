"""Small language models with the operators and names of onnxruntime-genai's builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
HEAD, BLOCK, EPSILON = 16, 16, 1e-6


class Writer:
    """Appends named nodes with random weights to a graph."""

    def __init__(self, seed: int) -> None:
        self.graph = ir.Graph(
            [], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="m"
        )
        self.rng = np.random.default_rng(seed)

    def weight(self, name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def normal(self, name: str, *shape: int, scale: float = 0.3) -> ir.Value:
        return self.weight(name, (self.rng.standard_normal(shape) * scale).astype(np.float32))

    def node(
        self, kind: str, name: str, inputs: list[ir.Value | None], outputs: int = 1, **given: Any
    ) -> Any:
        domain, _, op_type = kind.rpartition("::")
        node = ir.node(op_type, inputs, given, domain=domain, num_outputs=outputs, name=name)
        for i, y in enumerate(node.outputs):
            y.name = f"{name}/output_{i}"
        self.graph.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def input(self, name: str, dtype: ir.DataType, dims: list[str | int]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
        self.graph.inputs.append(value)
        return value

    def product(self, name: str, x: ir.Value, rows: int, columns: int, *, int4: bool) -> ir.Value:
        """Return ``x @ W`` with W of shape [rows, columns], optionally quantized to int4."""
        place = name.replace("/", ".").strip(".")
        if not int4:
            weight = self.normal(f"{place}.MatMul.weight", rows, columns)
            return self.node("MatMul", f"{name}/MatMul", [x, weight])
        blocks = rows // BLOCK
        packed = self.rng.integers(0, 256, (columns, blocks, BLOCK // 2)).astype(np.uint8)
        scales = self.rng.uniform(0.02, 0.06, (columns, blocks)).astype(np.float32)
        return self.node(
            "com.microsoft::MatMulNBits",
            f"{name}/MatMul_Q4",
            [
                x,
                self.weight(f"{place}.MatMul.weight_Q4", packed),
                self.weight(f"{place}.MatMul.weight_scales", scales),
            ],
            **{"K": rows, "N": columns, "bits": 4, "block_size": BLOCK, "accuracy_level": 0},
        )


def llama(
    vocabulary: int = 96,
    *,
    layers: int = 2,
    heads: int = 2,
    int4: bool = True,
    seed: int = 0,
    positions: int = 128,
) -> onnx.ModelProto:
    """Return a decoder with caches; keys and values have half as many heads as queries."""
    w = Writer(seed)
    width, kv = heads * HEAD, max(1, heads // 2)
    ids = w.input("input_ids", INT64, ["batch_size", "sequence_length"])
    mask = w.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
    cache = ["batch_size", kv, "past_sequence_length", HEAD]
    past = [
        [w.input(f"past_key_values.{i}.{kind}", FLOAT, [*cache]) for kind in ("key", "value")]
        for i in range(layers)
    ]
    one = w.weight("one", np.array([1], np.int64))
    total = w.node("ReduceSum", "/mask/ReduceSum", [mask, one], keepdims=0)
    last = w.node("Sub", "/mask/Sub", [total, one])
    seqlens = w.node("Cast", "/mask/Cast", [last], to=6)
    shape = w.node("Shape", "/mask/Shape", [mask])
    length = w.node("Gather", "/mask/Gather", [shape, w.weight("at", np.array(1, np.int64))])
    length = w.node("Cast", "/mask/Cast_1", [length], to=6)
    angles = np.outer(np.arange(positions), 1e4 ** (-np.arange(HEAD // 2) / (HEAD // 2)))
    cos = w.weight("cos_cache", np.cos(angles).astype(np.float32))
    sin = w.weight("sin_cache", np.sin(angles).astype(np.float32))
    table = w.normal("model.embed_tokens.weight", vocabulary, width, scale=1.0)
    x = w.node("Gather", "/model/embed_tokens/Gather", [table, ids])
    skip: ir.Value | None = None
    presents: list[tuple[ir.Value, ...]] = []
    for i in range(layers):
        at = f"/model/layers.{i}"
        h, x = _norm(w, f"{at}/input_layernorm", x, skip, width)
        qkv = w.product(f"{at}/attn/qkv_proj", h, width, width + 2 * kv * HEAD, int4=int4)
        mixed, key, value = w.node(
            "com.microsoft::GroupQueryAttention",
            f"{at}/attn/GroupQueryAttention",
            [qkv, None, None, *past[i], seqlens, length, cos, sin],
            3,
            **{"num_heads": heads, "kv_num_heads": kv, "do_rotary": 1},
        )
        presents.append((key, value))
        skip = w.product(f"{at}/attn/o_proj", mixed, width, width, int4=int4)
        h, x = _norm(w, f"{at}/post_attention_layernorm", x, skip, width)
        gate = w.product(f"{at}/mlp/gate_proj", h, width, 2 * width, int4=int4)
        up = w.product(f"{at}/mlp/up_proj", h, width, 2 * width, int4=int4)
        act = w.node("Mul", f"{at}/mlp/act/Mul", [gate, w.node("Sigmoid", f"{at}/mlp/act", [gate])])
        both = w.node("Mul", f"{at}/mlp/Mul", [act, up])
        skip = w.product(f"{at}/mlp/down_proj", both, 2 * width, width, int4=int4)
    h, _ = _norm(w, f"/model/layers.{layers}/final_norm_layernorm", x, skip, width)
    logits = w.product("/lm_head", h, width, vocabulary, int4=int4)
    _output(w.graph, logits, "logits", ["batch_size", "sequence_length", vocabulary])
    for i, pair in enumerate(presents):
        for kind, y in zip(("key", "value"), pair, strict=True):
            _output(w.graph, y, f"present.{i}.{kind}", [*cache[:2], "total_sequence_length", HEAD])
    return ir.to_proto(ir.Model(w.graph, ir_version=10))


def _norm(
    w: Writer, name: str, x: ir.Value, skip: ir.Value | None, width: int
) -> tuple[ir.Value, ir.Value]:
    """Return the normalized sum and the sum."""
    scale = w.weight(f"{name.strip('/').replace('/', '.')}.weight", np.ones(width, np.float32))
    if skip is None:
        kind = "SimplifiedLayerNormalization"
        return w.node(kind, name, [x, scale], epsilon=EPSILON, axis=-1, stash_type=1), x
    kind = "com.microsoft::SkipSimplifiedLayerNormalization"
    y, _, _, total = w.node(kind, name, [x, skip, scale], 4, epsilon=EPSILON)
    return y, total


def _output(graph: ir.Graph, y: ir.Value, name: str, dims: list[str | int]) -> None:
    y.name, y.type, y.shape = name, ir.TensorType(FLOAT), ir.Shape(dims)
    graph.outputs.append(y)


def genai_folder(folder: Path, model: onnx.ModelProto, *, context: int = 128) -> Path:
    """Write a model with its genai_config.json; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    vocabulary = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    decoder = {"filename": "model.onnx", "head_size": HEAD}
    settings = {"type": "llama", "context_length": context, "vocab_size": vocabulary}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": settings, "search": {}}))
    return folder


def encoder(vocabulary: int = 96, width: int = 16, *, classes: int = 0) -> onnx.ModelProto:
    """Return a small encoder with token embeddings or, with ``classes``, logits."""
    w = Writer(3)
    ids, mask, types = (
        w.input(name, INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    words = w.node("Gather", "words", [w.normal("embeddings.word.weight", vocabulary, width), ids])
    kinds = w.node("Gather", "kinds", [w.normal("embeddings.type.weight", 2, width), types])
    x = w.node("Add", "embedded", [words, kinds])
    q, k, v = (
        w.node(
            "MatMul", f"layer.0.attention.{n}", [x, w.normal(f"layer.0.{n}.weight", width, width)]
        )
        for n in ("query", "key", "value")
    )
    scores = w.node("MatMul", "scores", [q, w.node("Transpose", "keys", [k], perm=[0, 2, 1])])
    seen = w.node("Unsqueeze", "seen", [mask, w.weight("one", np.array([1], np.int64))])
    seen = w.node("Cast", "seen_as_bool", [seen], to=9)
    scores = w.node("Where", "masked", [seen, scores, w.weight("low", np.array(-1e9, np.float32))])
    mixed = w.node("MatMul", "mixed", [w.node("Softmax", "weights", [scores]), v])
    hidden = w.node("Add", "hidden", [x, mixed])
    if not classes:
        _output(w.graph, hidden, "last_hidden_state", ["batch", "sequence", width])
    else:
        first = w.node("Gather", "first", [hidden, w.weight("zero", np.array(0, np.int64))], axis=1)
        head = w.normal("classifier.weight", width, classes)
        bias = w.weight("classifier.bias", np.zeros(classes, np.float32))
        _output(
            w.graph, w.node("Gemm", "logits", [first, head, bias]), "logits", ["batch", classes]
        )
    return ir.to_proto(ir.Model(w.graph, ir_version=10))
