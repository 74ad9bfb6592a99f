"""Adapters for onnxruntime: ``.onnx_adapter`` files, and a base model with inputs for them.

A model written to the folder of the original refers to the original's external data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.branches import AdapterSpec, attach_adapters
from onnxtrain.adapters.layers import find_base_layers, find_target_modules
from onnxtrain.errors import PrepareError, SaveError
from onnxtrain.graph.io import save
from onnxtrain.graph.io.external_data import (
    MAPPED_MODEL_BYTES,
    STORED_TENSOR,
    StoredTensor,
)
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.importer.parameters import PARAMETERS
from onnxtrain.runtime.ort_values import write_adapter

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Adapted


def save_with_external_references(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model; refer to external data in the same folder instead of copying it.

    Without such data the model is saved with its own, so that it can be moved. Large weights that
    are mapped from a file stay external: a protobuf with them would be in memory twice.
    """
    folder = Path(os.path.abspath(os.fsdecode(path))).parent
    locations = {n: _external_location(x) for n, x in model.graph.initializers.items()}
    if not any(p is not None and Path(p.file).parent == folder for p in locations.values()):
        if any(locations.values()):
            save(model, path, external_data_above=MAPPED_MODEL_BYTES)
        else:
            save(model, path)
        return
    work = model.clone()
    for name, x in work.graph.initializers.items():
        location, tensor = locations[name], x.const_value
        if location is None or tensor is None or Path(location.file).parent != folder:
            continue
        x.const_value = ir.ExternalTensor(
            Path(location.file).name,
            location.offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
            base_dir=str(folder),
        )
    data = ir.to_proto(work).SerializeToString(deterministic=True)
    write_files(repr(os.fsdecode(path)), {os.path.abspath(os.fsdecode(path)): bytes_writer(data)})


def _external_location(x: ir.Value) -> StoredTensor | None:
    return None if x.const_value is None else x.const_value.meta.get(STORED_TENSOR)


def write_ort_adapter(
    path: str | os.PathLike[str], adapted: Adapted, values: Mapping[str, np.ndarray]
) -> None:
    """Write a file for ``onnxruntime.LoraAdapter`` and onnxruntime-genai."""
    _check(adapted)
    initializers = adapted.model.graph.initializers
    arrays: dict[str, np.ndarray] = {}
    for a in adapted.adapters:
        # B contains the scaling: one base then serves adapters of any rank and alpha.
        for name, array in ((a.a, values[a.a]), (a.b, values[a.b] * np.float32(a.scaling))):
            dtype = initializers[name].dtype
            assert dtype is not None
            arrays[name] = np.ascontiguousarray(array.astype(dtype.numpy()))
    write_adapter(path, arrays)


def write_ort_base(path: str | os.PathLike[str] | None, adapted: Adapted) -> Path:
    """Write the base model with inputs for adapters, and return its path."""
    _check(adapted)
    if path is None:
        if adapted.base is None:
            raise SaveError(
                "the model was not loaded from a file\nhint: export_ort_base('base.onnx')"
            )
        base = Path(adapted.base)
        path = base.with_name(f"{base.stem}.lora.onnx")
    output = Path(path)
    if adapted.base is not None and os.path.abspath(output) == os.path.abspath(adapted.base):
        raise SaveError(
            f"{os.fsdecode(path)!r}: this would overwrite the model\nhint: use another file name"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    save_with_external_references(base_with_inputs(adapted), output)
    return output


def base_with_inputs(adapted: Adapted) -> ir.Model:
    """Return the model with A and B as inputs whose defaults have rank 0, and a scaling of 1."""
    model = adapted.plain.clone()
    candidates = {
        u.module: u for u in find_target_modules(find_base_layers(model.graph), adapted.family)
    }
    specs = [AdapterSpec(candidates[a.module], 0, 0.0, False) for a in adapted.adapters]
    start = {n: np.zeros(s) for p in specs for n, s in zip(p.names, p.shapes, strict=True)}
    attach_adapters(model, specs, start, 0.0)
    del model.metadata_props[PARAMETERS]
    for a in adapted.adapters:
        model.graph.inputs.extend(model.graph.initializers[n] for n in (a.a, a.b))
    return model


def _check(adapted: Adapted) -> None:
    if adapted.dora:
        raise PrepareError(
            f".onnx_adapter files do not support the magnitudes of DoRA: "
            f"{adapted.adapters[0].module}\n"
            "hint: export_merged folds them into the weights (quantized layers: "
            "quantized='requantize'); export_peft supports them; or use dora=False"
        )
