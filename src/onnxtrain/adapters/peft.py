"""Directories of PEFT: adapter_config.json and adapter_model.safetensors.

Whole layers that train beside adapters, in PEFT's way: ``modules_to_save``.

Values of adapters after training: from a trainer, a checkpoint or a mapping.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.branches import Adapter
from onnxtrain.adapters.families import FAN_IN_FAN_OUT, transformers_name
from onnxtrain.adapters.layers import (
    CONV,
    EMBEDDING,
    LINEAR,
    BaseLayer,
    find_base_layers,
    frozen_weight,
)
from onnxtrain.checkpoint.safetensors_file import load_checkpoint, safetensors_bytes
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.graph.nodes import is_op

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Adapted

SavedModules = dict[str, dict[str, np.ndarray]]
"""Module -> ``weight`` and ``bias``, in torch's layout."""


def saved_modules(adapted: Adapted, values: Mapping[str, np.ndarray]) -> SavedModules:
    """Return whole modules by torch's names and layouts.

    Args:
        adapted: the model that they are of.
        values: trained weights of its file, by name.

    Raises:
        PrepareError: a weight is of no module that can be told.
    """
    model = adapted.plain.clone()
    _set_all(model, values)
    places = _stored_tensors(model, adapted.family)
    saved: SavedModules = {}
    for name, array in values.items():
        module, part, layer = places.get(name) or _by_name(name)
        if layer is not None and layer.kind == LINEAR and part == "weight":
            array = frozen_weight(layer).T
        saved.setdefault(module, {})[part] = np.ascontiguousarray(array)
    return saved


def load_saved_modules(
    model: ir.Model, saved: SavedModules, family: str | None, label: str
) -> None:
    """Give a model the weights of whole modules, in place.

    Raises:
        CheckpointError: the model has no such module, or of another size.
    """
    places = {(m, p): (n, layer) for n, (m, p, layer) in _stored_tensors(model, family).items()}
    names = model.graph.initializers
    for module, parts in saved.items():
        for part, array in parts.items():
            name, layer = places.get((module, part), (f"{module}.{part}", None))
            if name not in names:
                raise CheckpointError(f"{label}: the model has no {module}.{part} to save")
            if layer is not None and layer.kind == LINEAR and part == "weight":
                array = _as_stored(layer, names[name], array)
            tensor = names[name].const_value
            if tensor is None or tuple(tensor.shape) != array.shape:
                raise CheckpointError(
                    f"{label}: {module}.{part} has shape {list(array.shape)}, the model another\n"
                    "hint: onnxtrain.replace_head makes a last layer for other classes"
                )
            _set_all(model, {name: array})


def _as_stored(layer: BaseLayer, weight: ir.Value, array: np.ndarray) -> np.ndarray:
    """Return [outputs, inputs] as the file holds it."""
    tensor, as_rows = weight.const_value, frozen_weight(layer)
    stored = None if tensor is None else tensor.numpy()
    if stored is not None and np.array_equal(stored, as_rows):
        return array.T
    return array


def _stored_tensors(
    model: ir.Model, family: str | None
) -> dict[str, tuple[str, str, BaseLayer | None]]:
    """Return the module and the part of it that each stored tensor of a layer is."""
    places: dict[str, tuple[str, str, BaseLayer | None]] = {}
    for layer in find_base_layers(model.graph):
        if len(layer.parts) > 1 or len(layer.weights) != 1:
            continue
        module = transformers_name(layer.module, family)
        places[layer.weights[0].name or ""] = module, "weight", layer
        for bias in _biases(layer):
            places[bias] = module, "bias", layer
    return places


def _biases(layer: BaseLayer) -> Iterable[str]:
    node = layer.node
    values = list(node.inputs[2:3]) if is_op(node, "Gemm", "Conv") else []
    if is_op(node, "MatMul"):
        behind = [u.node for u in node.outputs[0].uses() if is_op(u.node, "Add")]
        values = [x for n in behind for x in n.inputs]
    return [x.name or "" for x in values if x is not None and x.is_initializer()]


def _by_name(name: str) -> tuple[str, str, BaseLayer | None]:
    module, _, part = name.rpartition(".")
    if not module or part not in ("weight", "bias"):
        raise PrepareError(
            f"{name!r} trained beside the adapters, and PEFT has no place for it\n"
            "hint: train weights and biases of layers with names, or use export_merged"
        )
    return module, part, None


def _set_all(model: ir.Model, values: Mapping[str, np.ndarray]) -> None:
    for name, array in values.items():
        x = model.graph.initializers[name]
        dtype = x.dtype or ir.DataType.FLOAT
        x.const_value = ir.Tensor(
            np.ascontiguousarray(array.astype(dtype.numpy())), dtype, name=name
        )


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {
    "lora_A": (".lora_A.weight", ".lora_embedding_A"),
    "lora_B": (".lora_B.weight", ".lora_embedding_B"),
    "magnitude": (".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
}
_MODULE_PARAMETERS = ("weight", "bias")
_UNSUPPORTED_FIELDS = ("bias", "layer_replication", "megatron_config", "trainable_tokens")


def write_peft(
    directory: str | os.PathLike[str],
    adapted: Adapted,
    values: Mapping[str, np.ndarray],
    *,
    saved: SavedModules | None = None,
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
        tensors.update(_peft_tensors(a, values))
    for module, parts in (saved or {}).items():
        tensors.update((f"{_PREFIX}{module}.{part}", array) for part, array in parts.items())
    settings = peft_config(adapted, base_model, task_type)
    settings["modules_to_save"] = sorted(saved) if saved else None
    config = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    files = {
        str(folder / TENSORS): bytes_writer(safetensors_bytes(tensors, {"format": "pt"})),
        str(folder / CONFIG): bytes_writer(config.encode()),
    }
    write_files(repr(os.fsdecode(directory)), files)


def _peft_tensors(a: Adapter, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
        self.saved: SavedModules = collections.defaultdict(dict)
        """Whole modules that trained beside the adapters."""
        for key, array in load_checkpoint(folder / TENSORS)[0].items():
            module, part = self._place(key)
            group = self.saved if part in _MODULE_PARAMETERS else self.tensors
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
        if part in _MODULE_PARAMETERS and any(
            module == m or module.endswith("." + m) for m in whole
        ):
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
    for name in _UNSUPPORTED_FIELDS:
        if config.get(name) not in (None, "none", [], {}):
            raise CheckpointError(f"{label}: {name}={config[name]!r} has no place in a graph")
    return config


class HasParameters(Protocol):
    """A trainer, or whatever else has parameters by name."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The parameters by name."""
        ...


Weights = HasParameters | Mapping[str, Any] | str | os.PathLike[str] | None
"""A trainer, arrays by name, the path of a checkpoint, or ``None``: as they are in the model."""


def trained_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return the tensors of the adapters by name, in float32; what is not given is as it was.

    Raises:
        CheckpointError: if nothing fits, or a shape does not.
    """
    values = {n: np.asarray(a, np.float32) for n, a in adapted.parameters.items()}
    if weights is None:
        return values
    given = _arrays_of(weights)
    known = [n for n in given if n in values]
    if not known:
        few = ", ".join(list(given)[:3]) or "nothing"
        raise CheckpointError(
            f"these weights are not of this model's adapters: they hold {few}\n"
            f"hint: the adapters are called {', '.join(list(values)[:2])} and so on"
        )
    for name in known:
        array = np.asarray(given[name], np.float32)
        if array.shape != values[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {list(array.shape)}, expected {list(values[name].shape)}"
            )
        values[name] = array
    return values


def non_adapter_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return weights of the file that trained beside the adapters, by name."""
    if weights is None:
        return {}
    own = adapted.plain.graph.initializers
    return {n: np.asarray(a, np.float32) for n, a in _arrays_of(weights).items() if n in own}


def _arrays_of(
    weights: HasParameters | Mapping[str, Any] | str | os.PathLike[str],
) -> Mapping[str, Any]:
    if isinstance(weights, str | os.PathLike):
        return load_checkpoint(weights)[0]
    return weights if isinstance(weights, Mapping) else weights.parameters
