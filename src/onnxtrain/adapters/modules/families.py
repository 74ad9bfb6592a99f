"""Families of models whose torch modules are cut otherwise than a file's: packed, or renamed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
}
"""Model type -> a packed module of transformers -> the parts that files may have of it."""

_Rules = tuple[tuple[str, str], ...]

_HEADED: _Rules = (
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
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    **dict.fromkeys(("falcon", "bloom", "gpt_neox", "persimmon"), _HEADED),
}
"""Model type -> patterns of paths in files, and the paths of transformers."""

INTERLEAVED = frozenset({"falcon", "bloom", "gpt_neox", "persimmon", "codegen"})
"""Model types whose packed layer has queries, keys and values head by head, not side by side."""
_APART = ("q_proj", "k_proj", "v_proj")

FAN_IN_FAN_OUT = frozenset({"gpt2"})
"""Model types whose torch layers hold their weights the other way round."""


def model_type(path: str | os.PathLike[str] | None) -> str | None:
    """Return the kind of model that the files beside a model tell, as transformers names it."""
    if path is None:
        return None
    folder = Path(path).parent
    config = _read(folder / "config.json").get("model_type")
    if isinstance(config, str):
        return config
    inner = _read(folder / "genai_config.json").get("model")
    kind = inner.get("type") if isinstance(inner, Mapping) else None
    return kind if isinstance(kind, str) else None


def renamed(module: str, family: str | None) -> str:
    """Return what transformers calls a module of this family.

    >>> renamed("model.layers.0.self_attn.o_proj", "phi")
    'model.layers.0.self_attn.dense'
    """
    for old, new in RENAMED.get(family or "", ()):
        if re.search(old, module):
            return re.sub(old, new, module)
    return module


def foreign(module: str, family: str | None) -> bool:
    """Return whether transformers has no such module: a part of a layer that it packs by heads.

    >>> foreign("transformer.h.0.self_attention.q_proj", "falcon")
    True
    """
    return family in INTERLEAVED and module.split(".")[-1] in _APART


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


__all__ = ["FAN_IN_FAN_OUT", "PACKED", "foreign", "model_type", "renamed"]
