"""Directories of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.adapters.adapter import Adapter
from onnxtrain.adapters.files.saved_modules import Saved
from onnxtrain.adapters.modules.families import FAN_IN_FAN_OUT
from onnxtrain.adapters.modules.layers import CONV, EMBEDDING
from onnxtrain.checkpoint.safetensors_file import load_checkpoint, plain_bytes
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph.io.atomic import content, write_files

if TYPE_CHECKING:
    from onnxtrain.adapters.adapted import Adapted

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {
    "lora_A": (".lora_A.weight", ".lora_embedding_A"),
    "lora_B": (".lora_B.weight", ".lora_embedding_B"),
    "magnitude": (".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
}
_WHOLE = ("weight", "bias")
_FOREIGN = ("bias", "layer_replication", "megatron_config", "trainable_tokens")


def write_peft(
    directory: str | os.PathLike[str],
    adapted: Adapted,
    values: Mapping[str, np.ndarray],
    *,
    saved: Saved | None = None,
    base_model: str = "",
    task_type: str | None = None,
) -> None:
    """Write adapters and whole modules as PEFT does, so that it loads them onto the original."""
    if adapted.foreign:
        raise PrepareError(
            f"torch packs {adapted.foreign[0]!r} with other modules of {adapted.family}, head by "
            "head: PEFT has no adapter for it alone\n"
            "hint: export_merged and export_ort_adapter write it; or leave q_proj, k_proj and "
            "v_proj out of `targets`"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for a in adapted.adapters:
        tensors.update(_as_peft(a, values))
    for module, parts in (saved or {}).items():
        tensors.update((f"{_PREFIX}{module}.{part}", array) for part, array in parts.items())
    settings = peft_config(adapted, base_model, task_type)
    settings["modules_to_save"] = sorted(saved) if saved else None
    config = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    files = {
        str(folder / TENSORS): content(plain_bytes(tensors, {"format": "pt"})),
        str(folder / CONFIG): content(config.encode()),
    }
    write_files(repr(os.fsdecode(directory)), files)


def _as_peft(a: Adapter, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter by PEFT's names, in its layout: [outputs, inputs]."""
    stem, place = _PREFIX + a.module, int(a.kind == EMBEDDING)
    first, second = values[a.a], values[a.b]
    if a.kind != CONV:
        first, second = first.T, second.T
    tensors = {
        stem + _SUFFIXES["lora_A"][place]: first,
        stem + _SUFFIXES["lora_B"][place]: second,
    }
    if a.magnitude is not None:
        magnitude = values[a.magnitude]
        if a.kind == CONV:
            magnitude = magnitude.reshape(1, -1, *(1,) * (first.ndim - 2))
        tensors[stem + _SUFFIXES["magnitude"][0]] = magnitude
    return tensors


def peft_config(
    adapted: Adapted, base_model: str = "", task_type: str | None = None
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    ranks = {a.module: a.rank for a in adapted.adapters if a.rank != adapted.rank}
    alphas = {a.module: _number(a.alpha) for a in adapted.adapters if a.alpha != adapted.alpha}
    return {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": base_model,
        "task_type": task_type,
        "inference_mode": True,
        "r": adapted.rank,
        "lora_alpha": _number(adapted.alpha),
        "lora_dropout": adapted.dropout,
        "target_modules": target_modules(adapted.adapters, adapted.modules),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": adapted.rslora,
        "use_dora": adapted.dora,
        "fan_in_fan_out": adapted.family in FAN_IN_FAN_OUT,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def target_modules(adapters: Sequence[Adapter], modules: Sequence[str]) -> list[str]:
    """Return what PEFT is told to adapt: last names of modules if they say it all, else paths."""
    chosen = {a.module for a in adapters}
    last = {m.split(".")[-1] for m in chosen}
    meant = {m for m in modules if m.split(".")[-1] in last}
    return sorted(last if meant == chosen else chosen)


def _number(x: float) -> int | float:
    return int(x) if x == int(x) else x


class PeftAdapter:
    """An adapter directory of PEFT, read and checked.

    Raises:
        CheckpointError: if it is no LoRA adapter, or has parts that have no place in a graph.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.label = repr(os.fsdecode(directory))
        folder = Path(directory)
        self.config = _read_config(folder / CONFIG, self.label)
        if not (folder / TENSORS).is_file():
            raise CheckpointError(
                f"{self.label}: there is no {TENSORS}\n"
                "hint: save it with safe_serialization=True; pickles are not read"
            )
        self.tensors: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
        self.saved: Saved = collections.defaultdict(dict)
        """Whole modules that trained beside the adapters."""
        for key, array in load_checkpoint(folder / TENSORS)[0].items():
            module, part = self._place(key)
            group = self.saved if part in _WHOLE else self.tensors
            group[module][part] = np.asarray(array, np.float32)
        lacking = [m for m, parts in self.tensors.items() if not {"lora_A", "lora_B"} <= set(parts)]
        if lacking or not self.tensors:
            raise CheckpointError(f"{self.label}: an adapter without both factors: {lacking[:3]}")

    def _place(self, key: str) -> tuple[str, str]:
        """Return the module and the part that a tensor is of."""
        for part, suffixes in _SUFFIXES.items():
            for suffix in suffixes:
                if key.endswith(suffix):
                    return key.removesuffix(suffix).removeprefix(_PREFIX), part
        path = key.removeprefix(_PREFIX).replace(".modules_to_save.default", "")
        module, _, part = path.rpartition(".")
        whole = self.config.get("modules_to_save") or ()
        if part in _WHOLE and any(module == m or module.endswith("." + m) for m in whole):
            return module, part
        raise CheckpointError(
            f"{self.label}: a tensor that is no LoRA factor: {key!r}\n"
            "hint: adapters with biases of their own cannot be loaded"
        )

    @property
    def rslora(self) -> bool:
        """Whether the scaling is alpha / sqrt(rank)."""
        return bool(self.config.get("use_rslora", False))

    @property
    def dora(self) -> bool:
        """Whether there are magnitudes."""
        return bool(self.config.get("use_dora", False))

    @property
    def rank(self) -> int:
        """The rank that most adapters have."""
        return int(self.config.get("r", 8))

    @property
    def dropout(self) -> float:
        """The share of activations dropped in training."""
        return float(self.config.get("lora_dropout") or 0.0)

    def alpha(self, module: str | None = None) -> float:
        """Return what scales a module, or all without an entry of their own."""
        alpha = self.config.get("lora_alpha", 8)
        for pattern, own in (self.config.get("alpha_pattern") or {}).items():
            if module is not None and (module == pattern or module.endswith("." + pattern)):
                alpha = own
        return float(alpha)


def _read_config(path: Path, label: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{label}: {CONFIG} cannot be read: {error.strerror}\n"
            "hint: give the directory that PEFT's save_pretrained wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: {CONFIG} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"{label}: no LoRA adapter, but {kind}\nhint: only LoRA can be loaded"
        )
    for name in _FOREIGN:
        if config.get(name) not in (None, "none", [], {}):
            raise CheckpointError(f"{label}: {name}={config[name]!r} has no place in a graph")
    return config


__all__ = ["PeftAdapter", "peft_config", "write_peft"]
