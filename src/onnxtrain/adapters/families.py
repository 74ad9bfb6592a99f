"""Families of models whose torch modules are cut otherwise than a file's: packed, or renamed."""

from __future__ import annotations

import json
import os
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

RENAMED: dict[str, dict[str, str]] = {
    "phi": {"self_attn.o_proj": "self_attn.dense"},
    "gpt2": {
        "attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
}
"""Model type -> the end of a path in files -> its end in transformers."""

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
    for old, new in RENAMED.get(family or "", {}).items():
        if module.endswith("." + old):
            return module.removesuffix(old) + new
    return module


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


__all__ = ["FAN_IN_FAN_OUT", "PACKED", "model_type", "renamed"]
