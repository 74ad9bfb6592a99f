"""Adapters for stock onnxruntime: a base file with inputs for them, and ``.onnx_adapter`` files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.attach import Plan, attach
from onnxtrain.adapters.files.refer import save_referring
from onnxtrain.adapters.modules.layers import layers_of
from onnxtrain.adapters.modules.units import units_of
from onnxtrain.errors import PrepareError, SaveError
from onnxtrain.graph.roles import PARAMETERS
from onnxtrain.runtime.adapter_file import write_adapter

if TYPE_CHECKING:
    from onnxtrain.adapters.adapted import Adapted


def write_ort_adapter(
    path: str | os.PathLike[str], adapted: Adapted, values: Mapping[str, np.ndarray]
) -> None:
    """Write the file that ``onnxruntime.LoraAdapter`` and onnxruntime-genai load."""
    _check(adapted)
    known = adapted.model.graph.initializers
    arrays: dict[str, np.ndarray] = {}
    for a in adapted.adapters:
        # The base knows no scaling, so that it serves adapters of any rank and alpha.
        for name, array in ((a.a, values[a.a]), (a.b, values[a.b] * np.float32(a.scaling))):
            dtype = known[name].dtype
            assert dtype is not None
            arrays[name] = np.ascontiguousarray(array.astype(dtype.numpy()))
    write_adapter(path, arrays)


def write_ort_base(path: str | os.PathLike[str] | None, adapted: Adapted) -> Path:
    """Write the model with an input for each factor; by default, empty ones or kernels of 0."""
    _check(adapted)
    if path is None:
        if adapted.base is None:
            raise SaveError("the model came from no file\nhint: give a path")
        base = Path(adapted.base)
        path = base.with_name(f"{base.stem}.lora.onnx")
    target = Path(path)
    if adapted.base is not None and _same(target, Path(adapted.base)):
        raise SaveError(
            f"{os.fsdecode(path)!r} is the file of the model itself, which stays as it is"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    save_referring(base_with_inputs(adapted), target)
    return target


def base_with_inputs(adapted: Adapted) -> ir.Model:
    """Return the model whose factors are inputs with empty defaults, and whose scaling is 1."""
    model = adapted.plain.clone()
    model.meta.update(adapted.plain.meta)
    units = {u.module: u for u in units_of(layers_of(model.graph), adapted.family)}
    plans = [Plan(units[a.module], 0, 0.0, False) for a in adapted.adapters]
    start = {n: np.zeros(s) for p in plans for n, s in zip(p.names, p.shapes, strict=True)}
    attach(model, plans, start, 0.0)
    del model.metadata_props[PARAMETERS]
    for a in adapted.adapters:
        model.graph.inputs.extend(model.graph.initializers[n] for n in (a.a, a.b))
    return model


def _check(adapted: Adapted) -> None:
    if adapted.dora:
        raise PrepareError(
            "an .onnx_adapter has no place for the magnitudes of DoRA: "
            f"{adapted.adapters[0].module}\n"
            "hint: export_merged writes one model that has them folded in (quantised layers: "
            "quantised='requantise'), export_peft a directory for PEFT; or dora=False"
        )


def _same(a: Path, b: Path) -> bool:
    return os.path.abspath(a) == os.path.abspath(b)


__all__ = ["base_with_inputs", "write_ort_adapter", "write_ort_base"]
