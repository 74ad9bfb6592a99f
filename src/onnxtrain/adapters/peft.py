"""Read and write PEFT adapters: adapter_config.json and adapter_model.safetensors.

In this order: weights of whole modules (``modules_to_save``), writing a directory, reading one
(``PeftAdapter``), and trained values from a trainer, a checkpoint or a mapping.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.branches import Adapter, hyperparameter_problem, share_rows
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
from onnxtrain.graph.io.limits import quote, read_json
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.graph.nodes import is_op

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Adapted

SavedModules = dict[str, dict[str, np.ndarray]]
"""Module name -> ``weight`` and ``bias``, in torch's layout."""


def saved_modules(adapted: Adapted, values: Mapping[str, np.ndarray]) -> SavedModules:
    """Return trained base weights as ``modules_to_save``, with torch's names and layouts.

    Args:
        adapted: the model with adapters.
        values: trained initializers of the file, by name.

    Raises:
        PrepareError: if the module of a weight is unknown.
    """
    model = adapted.plain.clone()
    _set_values(model, values)
    tensors = _module_tensors(model, adapted.family)
    saved: SavedModules = {}
    for name, array in values.items():
        module, part, layer = tensors.get(name) or _split_name(name)
        if layer is not None and layer.kind == LINEAR and part == "weight":
            array = frozen_weight(layer).T
        saved.setdefault(module, {})[part] = np.ascontiguousarray(array)
    return saved


def load_saved_modules(
    model: ir.Model, saved: SavedModules, family: str | None, label: str
) -> None:
    """Set the weights of whole modules, in place.

    Raises:
        CheckpointError: if the model lacks a module, or its shape differs.
    """
    names = {(m, p): (n, layer) for n, (m, p, layer) in _module_tensors(model, family).items()}
    initializers = model.graph.initializers
    for module, parts in saved.items():
        for part, array in parts.items():
            name, layer = names.get((module, part), (f"{module}.{part}", None))
            if name not in initializers:
                raise CheckpointError(f"{label}: the model has no {module}.{part} to save")
            if layer is not None and layer.kind == LINEAR and part == "weight":
                array = _to_file_layout(layer, initializers[name], array)
            tensor = initializers[name].const_value
            shape = None if tensor is None else tuple(tensor.shape)
            if shape != array.shape:
                raise CheckpointError(
                    f"{label}: {module}.{part} has shape {list(array.shape)}, "
                    f"expected {None if shape is None else list(shape)}\n"
                    "hint: resize the last layer first: onnxtrain.replace_head(model, output, "
                    "classes)"
                )
            _set_values(model, {name: array})


def _to_file_layout(layer: BaseLayer, weight: ir.Value, array: np.ndarray) -> np.ndarray:
    """Return torch's ``[outputs, inputs]`` in the layout of the file, which may be transposed."""
    tensor, inputs_first = weight.const_value, frozen_weight(layer)
    if tensor is not None and np.array_equal(tensor.numpy(), inputs_first):
        return array.T
    return array


def _module_tensors(
    model: ir.Model, family: str | None
) -> dict[str, tuple[str, str, BaseLayer | None]]:
    """Return initializer name -> (module, ``weight`` or ``bias``, layer) for unpacked layers."""
    tensors: dict[str, tuple[str, str, BaseLayer | None]] = {}
    for layer in find_base_layers(model.graph):
        if len(layer.modules) > 1 or len(layer.weights) != 1:
            continue
        module = transformers_name(layer.module, family)
        tensors[layer.weights[0].name or ""] = module, "weight", layer
        for bias in _biases(layer):
            tensors[bias] = module, "bias", layer
    return tensors


def _biases(layer: BaseLayer) -> Iterable[str]:
    node = layer.node
    values = list(node.inputs[2:3]) if is_op(node, "Gemm", "Conv") else []
    if is_op(node, "MatMul"):
        adds = [u.node for u in node.outputs[0].uses() if is_op(u.node, "Add")]
        values = [x for n in adds for x in n.inputs]
    return [x.name or "" for x in values if x is not None and x.is_initializer()]


def _split_name(name: str) -> tuple[str, str, BaseLayer | None]:
    module, _, part = name.rpartition(".")
    if not module or part not in ("weight", "bias"):
        raise PrepareError(
            f"cannot export {name!r} to PEFT: it is not the weight or bias of a module\n"
            "hint: use export_merged, or remove it from `train`"
        )
    return module, part, None


def _set_values(model: ir.Model, values: Mapping[str, np.ndarray]) -> None:
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
_DEFAULT = 8  # of r and lora_alpha, in PEFT
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
    """Write adapters and whole modules as a directory that ``PeftModel.from_pretrained`` loads."""
    if adapted.peft_problem is not None:
        advice = (
            "remove q_proj, k_proj and v_proj from `targets`"
            if adapted.not_in_peft
            else "install torch and transformers, to compare the names; or pass family="
        )
        raise PrepareError(
            f"cannot export to PEFT: {adapted.peft_problem}\n"
            f"hint: export_merged and export_ort_adapter support it; or {advice}"
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
    """Return the tensors of an adapter with PEFT's names and layout, ``[outputs, inputs]``."""
    stem, embedding = _PREFIX + a.module, int(a.kind == EMBEDDING)
    lora_a, lora_b = values[a.a], values[a.b]
    if a.kind != CONV:
        lora_a, lora_b = lora_a.T, lora_b.T
    tensors = {
        stem + _SUFFIXES["lora_A"][embedding]: lora_a,
        stem + _SUFFIXES["lora_B"][embedding]: lora_b,
    }
    if a.magnitude is not None:
        magnitude = values[a.magnitude]
        if a.kind == CONV:
            magnitude = magnitude.reshape(1, -1, *(1,) * (lora_a.ndim - 2))
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
    """Return PEFT's ``target_modules``: last names if they select the same modules, else paths."""
    adapted = {a.module for a in adapters}
    last_names = {m.split(".")[-1] for m in adapted}
    selected = {m for m in modules if m.split(".")[-1] in last_names}
    return sorted(last_names if selected == adapted else adapted)


def _number(x: float) -> int | float:
    return int(x) if x == int(x) else x


class PeftAdapter:
    """A PEFT adapter directory.

    Raises:
        CheckpointError: if it is damaged, not LoRA, or uses unsupported options.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.label = repr(os.fsdecode(directory))
        folder = Path(directory)
        self.config = _read_config(folder / CONFIG, self.label)
        if not os.path.lexists(folder / TENSORS):
            raise CheckpointError(
                f"{self.label}: {TENSORS} is missing\n"
                "hint: save_pretrained(..., safe_serialization=True); pickles are not supported"
            )
        self.tensors: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
        self.saved: SavedModules = collections.defaultdict(dict)
        """``modules_to_save``: whole modules that were trained with the adapters."""
        for key, array in load_checkpoint(folder / TENSORS)[0].items():
            module, part = self._split_key(key)
            group = self.saved if part in _MODULE_PARAMETERS else self.tensors
            if part in group[module]:
                raise CheckpointError(f"{self.label}: two tensors {part} of {module!r}")
            group[module][part] = self._check_values(key, array)
        incomplete = [
            m for m, parts in self.tensors.items() if not {"lora_A", "lora_B"} <= set(parts)
        ]
        if incomplete:
            listing = ", ".join(incomplete[:3])
            raise CheckpointError(f"{self.label}: lora_A or lora_B is missing for {listing}")
        if not self.tensors:
            raise CheckpointError(f"{self.label}: {TENSORS} has no adapters")
        for module, parts in self.tensors.items():
            if min(parts["lora_A"].ndim, parts["lora_B"].ndim) < 2 or not len(parts["lora_A"]):
                shapes = [list(parts[n].shape) for n in ("lora_A", "lora_B")]
                raise CheckpointError(f"{self.label}: the factors of {module!r} have {shapes=}")

    def _check_values(self, key: str, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            values = np.asarray(array, np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.label}: {quote(key)} has values that are infinite or NaN\n"
                "hint: the training that wrote it diverged; take an earlier checkpoint"
            )
        return values

    def _split_key(self, key: str) -> tuple[str, str]:
        """Return the module of a tensor, and ``lora_A``, ``magnitude``, ``weight`` or similar."""
        for part, suffixes in _SUFFIXES.items():
            for suffix in suffixes:
                if key.endswith(suffix):
                    return key.removesuffix(suffix).removeprefix(_PREFIX), part
        path = key.removeprefix(_PREFIX).replace(".modules_to_save.default", "")
        module, _, part = path.rpartition(".")
        saved = self.config.get("modules_to_save") or ()
        if part in _MODULE_PARAMETERS and any(
            module == m or module.endswith("." + m) for m in saved
        ):
            return module, part
        raise CheckpointError(
            f"{self.label}: unexpected tensor {key!r}\n"
            "hint: only lora_A, lora_B, magnitudes and modules_to_save are supported; train with "
            'bias="none"'
        )

    @property
    def rslora(self) -> bool:
        """Whether the scaling is ``alpha / sqrt(rank)``."""
        return bool(self.config.get("use_rslora", False))

    @property
    def dora(self) -> bool:
        """Whether the adapter is DoRA."""
        return bool(self.config.get("use_dora", False))

    @property
    def rank(self) -> int:
        """The default rank; ``rank_pattern`` may override it."""
        return int(self.config.get("r", _DEFAULT))

    @property
    def dropout(self) -> float:
        """The dropout probability of the branches' inputs."""
        return float(self.config.get("lora_dropout") or 0.0)

    def alpha(self, module: str | None = None) -> float:
        """Return alpha of a module, or the default."""
        alpha = self.config.get("lora_alpha", _DEFAULT)
        for pattern, own in (self.config.get("alpha_pattern") or {}).items():
            if module is not None and (module == pattern or module.endswith("." + pattern)):
                return float(own)  # PEFT takes the first, too
        return float(alpha)


def _read_config(path: Path, label: str) -> dict[str, Any]:
    try:
        config = read_json(path)
    except OSError as error:
        raise CheckpointError(
            f"{label}: {CONFIG} cannot be read: {error.strerror}\n"
            "hint: pass the directory that PEFT's save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{label}: {CONFIG} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        name = kind if isinstance(kind, str) and kind.isidentifier() else quote(kind)
        raise CheckpointError(f"{label}: unsupported peft_type {name} (expected LORA)")
    for name in _UNSUPPORTED_FIELDS:
        if config.get(name) not in (None, "none", [], {}):
            raise CheckpointError(f"{label}: {name}={quote(config[name])} is not supported")
    problem = _config_problem(config)
    if problem is not None:
        raise CheckpointError(f"{label}: {CONFIG}: {problem}")
    return config


def _config_problem(config: Mapping[str, Any]) -> str | None:
    """Return which field that is read has a wrong value, or ``None``."""
    for name in ("use_rslora", "use_dora"):
        if not isinstance(config.get(name) or False, bool):
            return f"{name} must be true or false, got {quote(config[name])}"
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(m, str) for m in saved):
        return f"modules_to_save must be a list of names, got {quote(saved)}"
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        return f"alpha_pattern must map modules to numbers, got {quote(patterns)}"
    # PEFT reads keys as regular expressions; those of an untrusted file may take forever.
    expressions = [p for p in patterns if not re.fullmatch(r"[\w.-]*", p)]
    if expressions:
        return f"alpha_pattern has the regular expression {quote(expressions[0])}; name the modules"
    for alpha in (config.get("lora_alpha", _DEFAULT), *patterns.values()):
        rank, dropout = config.get("r", _DEFAULT), config.get("lora_dropout") or 0.0
        problem = hyperparameter_problem(rank, alpha, dropout)
        if problem is not None:
            return problem
    return None


class HasParameters(Protocol):
    """An object with named parameters, such as a trainer."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The parameters by name."""
        ...


Weights = HasParameters | Mapping[str, Any] | str | os.PathLike[str] | None
"""A trainer, arrays by name, the path of a checkpoint, or ``None`` for the model's own values."""


def trained_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return the tensors of the adapters by name, in float32; those not in `weights` as they were.

    Raises:
        CheckpointError: if `weights` has no tensor of the adapters, or one of another shape.
    """
    values = {n: np.asarray(a, np.float32) for n, a in adapted.parameters.items()}
    if weights is not None:
        values |= _values_of(adapted, weights, values)
    shared = {a.a: share_rows(values[a.a], a.block) for a in adapted.adapters}
    return values | shared


def _values_of(
    adapted: Adapted, weights: Any, values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    arrays = _arrays_of(weights)
    common = [n for n in arrays if n in values]
    if not common:
        found = ", ".join(list(arrays)[:3]) or "nothing"
        raise CheckpointError(
            f"the weights have no tensor of this model's adapters, but {found}\n"
            f"hint: names of the adapters are {', '.join(list(values)[:2])} ..."
        )
    found_values: dict[str, np.ndarray] = {}
    for name in common:
        array = np.asarray(arrays[name], np.float32)
        if array.shape != values[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {list(array.shape)}, expected {list(values[name].shape)}"
            )
        found_values[name] = array
    return found_values


def non_adapter_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return the trained initializers of the file itself, by name."""
    if weights is None:
        return {}
    base = adapted.plain.graph.initializers
    return {n: np.asarray(a, np.float32) for n, a in _arrays_of(weights).items() if n in base}


def _arrays_of(
    weights: HasParameters | Mapping[str, Any] | str | os.PathLike[str],
) -> Mapping[str, Any]:
    if isinstance(weights, str | os.PathLike):
        return load_checkpoint(weights)[0]
    return weights if isinstance(weights, Mapping) else weights.parameters
