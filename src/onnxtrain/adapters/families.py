"""Names of torch modules: which module a node of a file implements, in transformers' words.

First the differences between files and transformers per model family (packed and renamed modules),
then ``module_name``, which reads the module of a node from names of weights, biases, scopes and
nodes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.io.limits import read_json
from onnxtrain.graph.nodes import is_op
from onnxtrain.importer.parameters import is_generated_name

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PHI3 = {
    "self_attn.qkv_proj": _QKV,
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

PACKED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": _PHI3,
    "phi4mm": _PHI3,
    "glm": {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    "glm4": {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    "gpt2": {"attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj")},
    "granitemoehybrid": {"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
}
"""model_type -> packed module of transformers -> the separate modules that files may have."""

_Rules = tuple[tuple[str, str], ...]

_DECODER_RULES: _Rules = (
    (r"\.(self_attention|attention|self_attn)\.o_proj$", r".\1.dense"),
    (r"\.mlp\.up_proj$", ".mlp.dense_h_to_4h"),
    (r"\.mlp\.down_proj$", ".mlp.dense_4h_to_h"),
)
_GPT2: _Rules = (
    (r"\.attn\.o_proj$", ".attn.c_proj"),
    (r"\.mlp\.up_proj$", ".mlp.c_fc"),
    (r"\.mlp\.down_proj$", ".mlp.c_proj"),
)
_BERT: _Rules = (
    (r"\.attention\.(query|key|value)$", r".attention.self.\1"),
    (r"\.attention\.dense$", ".attention.output.dense"),
    (r"(\.layer\.\d+)\.dense$", r"\1.output.dense"),
)
_LFM2: _Rules = (
    (r"\.self_attn\.o_proj$", ".self_attn.out_proj"),
    (r"\.mlp\.gate_proj$", ".feed_forward.w1"),
    (r"\.mlp\.up_proj$", ".feed_forward.w3"),
    (r"\.mlp\.down_proj$", ".feed_forward.w2"),
)
RENAMED: dict[str, _Rules] = {
    "phi": (
        (r"\.self_attn\.o_proj$", ".self_attn.dense"),
        (r"\.mlp\.up_proj$", ".mlp.fc1"),
        (r"\.mlp\.down_proj$", ".mlp.fc2"),
    ),
    "gpt2": _GPT2,
    "starcoder2": _GPT2[1:],
    "gptj": (
        (r"\.attn\.o_proj$", ".attn.out_proj"),
        (r"\.mlp\.up_proj$", ".mlp.fc_in"),
        (r"\.mlp\.down_proj$", ".mlp.fc_out"),
    ),
    "opt": (
        (r"^model\.h\.(\d+)\.attn\.([qkv]_proj)$", r"model.decoder.layers.\1.self_attn.\2"),
        (r"^model\.h\.(\d+)\.attn\.o_proj$", r"model.decoder.layers.\1.self_attn.out_proj"),
        (r"^model\.h\.(\d+)\.mlp\.up_proj$", r"model.decoder.layers.\1.fc1"),
        (r"^model\.h\.(\d+)\.mlp\.down_proj$", r"model.decoder.layers.\1.fc2"),
        (r"^model\.wte$", "model.decoder.embed_tokens"),
        (r"^model\.wpe$", "model.decoder.embed_positions"),
    ),
    "distilbert": (
        (r"\.attention\.([qkv]|out)_proj$", r".attention.\1_lin"),
        (r"\.ffn\.up_proj$", ".ffn.lin1"),
        (r"\.ffn\.down_proj$", ".ffn.lin2"),
    ),
    "granitemoehybrid": ((r"\.mlp\.down_proj$", ".shared_mlp.output_linear"),),
    **dict.fromkeys(("lfm2", "lfm2moe", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    **dict.fromkeys(("falcon", "bloom", "gpt_neox", "persimmon"), _DECODER_RULES),
}
"""model_type -> (pattern of a path in the file, path in transformers)."""

_TRANSLATED = ("onnxruntime-genai", "mobius")
"""Producers that name the modules of all families alike, in their own words."""

_ATTENTION, _MLP = r"self_attn\.[qkvo]_proj", r"mlp\.(gate|up|down)_proj"
_LLAMA = f"{_ATTENTION}|{_MLP}"
_LFM2_MODULES = r"self_attn\.([qkv]|out)_proj|conv\.(in|out)_proj|feed_forward\.w[123]"
_LIKE_LLAMA = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "granite"),
    *("olmo", "olmo2", "arcee", "nemotron", "smollm3", "ernie4_5", "ernie4_5_dense"),
    *("hunyuandensev1", "hunyuan_v1_dense"),
)
MODULES: dict[str, str] = {
    **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
    **dict.fromkeys(("phi3", "phi4mm"), r"self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj"),
    **dict.fromkeys(("glm", "glm4"), rf"{_ATTENTION}|mlp\.(gate_up|down)_proj"),
    **dict.fromkeys(("lfm2", "lfm2moe", "lfm2_moe"), _LFM2_MODULES),
    "phi": r"self_attn\.([qkv]_proj|dense)|mlp\.fc[12]",
    "granitemoehybrid": rf"{_ATTENTION}|mamba\.(in|out)_proj|shared_mlp\.(in|out)put_linear",
}
"""model_type -> the linear layers of a block in transformers; those of `RENAMED` that are not here
are known from its rules. Compared with transformers and PEFT by ``tests.adapters.peft_check``."""

INTERLEAVED = frozenset({"falcon", "bloom", "gpt_neox", "persimmon", "codegen"})
"""Model types whose packed qkv layer interleaves queries, keys and values by head."""
_SEPARATE_QKV = ("q_proj", "k_proj", "v_proj")

FAN_IN_FAN_OUT = frozenset({"gpt2"})
"""Model types with ``Conv1D`` layers, whose weights are ``[inputs, outputs]`` in torch."""


def model_type(path: str | os.PathLike[str] | None) -> str | None:
    """Return transformers' ``model_type`` from the configuration files beside a model."""
    if path is None:
        return None
    folder = Path(path).parent
    config = _read(folder / "config.json").get("model_type")
    if isinstance(config, str):
        return config
    inner = _read(folder / "genai_config.json").get("model")
    kind = inner.get("type") if isinstance(inner, Mapping) else None
    return kind if isinstance(kind, str) else None


def transformers_name(module: str, family: str | None) -> str:
    """Return the name of a module in transformers.

    >>> transformers_name("model.layers.0.self_attn.o_proj", "phi")
    'model.layers.0.self_attn.dense'
    """
    for old, new in RENAMED.get(family or "", ()):
        if re.search(old, module):
            return re.sub(old, new, module)
    return module


def unverified_modules(model: ir.Model, modules: Sequence[str], family: str | None) -> list[str]:
    """Return the modules of an adapted file that transformers may call otherwise.

    Exporters that translate module names use one vocabulary for all families. Their names are
    known for the families of `MODULES` and `RENAMED`. Other families are compared with the class of
    transformers, where torch and transformers are installed.
    """
    names = model.graph.initializers
    translated = model.producer_name in _TRANSLATED or any(_BUILDER_WEIGHT in n for n in names)
    if not translated:
        return []
    known = MODULES.get(family or "")
    if known is not None:
        pattern = re.compile(rf"(model\.layers\.\d+\.({known})|model\.embed_tokens|lm_head)")
        return [m for m in modules if not pattern.fullmatch(m)]
    if family in RENAMED:
        return []
    torch_names = _torch_modules(family, modules)
    return [m for m in modules if m not in torch_names]


def _torch_modules(family: str | None, modules: Sequence[str]) -> frozenset[str]:
    """Return the names of all modules of a family's class in transformers; empty if unknown."""
    needed = ("torch", "transformers")
    if family is None or any(importlib.util.find_spec(n) is None for n in needed):
        return frozenset()
    layers = [int(n) for m in modules for n in re.findall(r"\.layers\.(\d+)\.", m)]
    torch, transformers = map(importlib.import_module, needed)
    try:
        config = transformers.AutoConfig.for_model(family, num_hidden_layers=max(layers) + 1)
        with torch.device("meta"):  # without memory for the weights
            net = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # classes of other kinds of models raise anything
        return frozenset()
    return frozenset(name for name, _ in net.named_modules())


def is_packed_by_heads(module: str, family: str | None) -> bool:
    """Return whether transformers packs this module with others, interleaved by head.

    >>> is_packed_by_heads("transformer.h.0.self_attention.q_proj", "falcon")
    True
    """
    return family in INTERLEAVED and module.split(".")[-1] in _SEPARATE_QKV


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


_WEIGHT = re.compile(
    r"(\.(MatMul|Gemm|Gather))?\.(weight|kernel)(_(Q\d+(G\d+)?|quantized|Bnb4|DQ\w*|fp16|bf16))?$"
)
_SUFFIX = re.compile(r"_(Q\d+(G\d+)?|quantized|Bnb4)$")
# Node metadata of torch.onnx exports: the module paths from the root to the node, as a list.
_SCOPES = "pkg.torch.onnx.name_scopes"
_OPERATOR = re.compile(r"^(node_)?(MatMul|Gemm|Gather|Conv|Fused\w+|Quant\w+)\w*$")
_BUILDER_WEIGHT = ".MatMul.weight"
# onnxruntime-genai's builder calls self_attn "attn" in all model families.
_GENAI_BUILDER = re.compile(r"^(model\.layers\.\d+)\.attn\.")


def module_name(node: ir.Node, weights: Sequence[ir.Value], *, shared: bool = False) -> str:
    """Return the path of the torch module that a node implements.

    The first that exists: the name of the weight, the scope in the metadata, the owner of the bias,
    the path in the node's name, any name of weight or node.

    Args:
        node: a linear layer, convolution or embedding.
        weights: the initializers it reads.
        shared: whether the weight is tied to an embedding, whose name it may have.
    """
    names = [x.name or "" for x in weights]
    by_weight = [_WEIGHT.sub("", n) for n in names[:1] if _WEIGHT.search(n)]
    named = [m for m in by_weight if not shared and not is_generated_name(m)]
    candidates = [*named, *_scopes(node), *_bias_owner(node), *_node_path(node)]
    if not candidates:
        plain = [_SUFFIX.sub("", n) for n in names[:1] if not is_generated_name(n)]
        candidates = [*by_weight, *plain, node.name or (node.outputs[0].name or "layer")]
    return to_transformers_path(candidates[0])


def weight_module(weight: ir.Value) -> str:
    """Return the module of an initializer, from its name."""
    return to_transformers_path(_WEIGHT.sub("", weight.name or ""))


def to_transformers_path(path: str) -> str:
    """Replace the module names of onnxruntime-genai's builder with those of transformers."""
    return _GENAI_BUILDER.sub(r"\1.self_attn.", path)


def is_genai_builder(weights: Sequence[ir.Value]) -> bool:
    """Return whether weights have the names of onnxruntime-genai's builder."""
    return any(_BUILDER_WEIGHT in (x.name or "") for x in weights)


def _scopes(node: ir.Node) -> list[str]:
    text = node.metadata_props.get(_SCOPES)
    if text is None:
        return []
    try:
        scopes = [str(s) for s in ast.literal_eval(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [s for s in scopes[-2:-1] if s]


def _bias_owner(node: ir.Node) -> list[str]:
    """Return the module of the bias that the node, or the Add behind it, reads."""
    values = list(node.inputs[2:])
    if not is_op(node, "Conv", "Gemm"):
        adds = [u.node for u in node.outputs[0].uses() if is_op(u.node, "Add")]
        values = [x for n in adds for x in n.inputs]
    stored = [x for x in values if x is not None and x.is_initializer()]
    # Exporters store equal tensors once: a bias with several uses has the name of one layer only.
    names = [x.name or "" for x in stored if len(x.uses()) == 1]
    return [n.removesuffix(".bias") for n in names if n.endswith(".bias")]


def _node_path(node: ir.Node) -> list[str]:
    """Return the module in a node name that contains its scope: ``/model/layers.0/fc1/MatMul``."""
    parts = (node.name or "").strip("/").split("/")
    if len(parts) < 2 or not _OPERATOR.match(parts[-1]):
        return []
    return [".".join(parts[:-1])]
