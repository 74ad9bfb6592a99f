"""``ORTTrainerOptions``: nested settings, checked when they are given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from onnxtrain.compat.ort.amp import LossScaler
from onnxtrain.compat.ort.optim import LRSchedulerBase

_DEFAULTS: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "cpu", "mem_limit": 0},
    "distributed": {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel": {},
        "allreduce_post_accumulation": False,
        "deepspeed_zero_optimization": {"stage": 0},
        "enable_adasum": False,
    },
    "lr_scheduler": None,
    "mixed_precision": {"enabled": False, "loss_scaler": None},
    "graph_transformer": {
        "attn_dropout_recompute": False,
        "gelu_recompute": False,
        "transformer_layer_recompute": False,
        "number_recompute_layers": 0,
        "propagate_cast_ops_config": {},
        "allow_layer_norm_mod_precision": False,
    },
    "utils": {
        "frozen_weights": [],
        "grad_norm_clip": True,
        "invertible_layer_norm_gradient": False,
        "run_symbolic_shape_infer": False,
    },
    "debug": {"deterministic_compute": False, "check_model_export": False, "graph_save_paths": {}},
    "_internal_use": {
        "enable_internal_postprocess": True,
        "extra_postprocess": None,
        "onnx_opset_version": 12,
        "enable_onnx_contrib_ops": True,
    },
    "provider_options": {},
    "session_options": None,
}
_FREE = ("pipeline_parallel", "propagate_cast_ops_config", "graph_save_paths", "provider_options")


class ORTTrainerOptions:
    """Settings by group; ``options.batch.gradient_accumulation_steps`` reads one.

    Raises:
        ValueError: for a setting that does not exist, or a value that does not fit.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._given = dict(options or {})
        merged = _merge(_DEFAULTS, self._given, "")
        _check(merged)
        self._values = merged
        for key, value in merged.items():
            setattr(self, key, _Group(value) if isinstance(value, dict) else value)

    def __repr__(self) -> str:
        return repr(self._values)


class _Group:
    def __init__(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            setattr(self, key, _Group(value) if isinstance(value, dict) else value)


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any], path: str) -> dict[str, Any]:
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(f"Invalid options: no such setting: {path}{unknown[0]}")
    merged = {}
    for key, default in defaults.items():
        value = given.get(key, default)
        if isinstance(default, dict) and key not in _FREE:
            if not isinstance(value, Mapping):
                raise ValueError(f"Invalid options: {path}{key} must be a dict")
            merged[key] = _merge(default, value, f"{path}{key}.") if key in given else dict(default)
        else:
            merged[key] = value if value is not default else copy.copy(default)
    return merged


def _check(values: Mapping[str, Any]) -> None:
    steps = values["batch"]["gradient_accumulation_steps"]
    scaler, schedule = values["mixed_precision"]["loss_scaler"], values["lr_scheduler"]
    wrong = None
    if not isinstance(steps, int) or steps < 1:
        wrong = f"batch.gradient_accumulation_steps must be a number from 1: {steps!r}"
    elif scaler is not None and not isinstance(scaler, LossScaler):
        wrong = "mixed_precision.loss_scaler must be a LossScaler"
    elif schedule is not None and not isinstance(schedule, LRSchedulerBase):
        wrong = "lr_scheduler must be one of optim.lr_scheduler"
    if wrong:
        raise ValueError(f"Invalid options: {wrong}")


__all__ = ["ORTTrainerOptions"]
