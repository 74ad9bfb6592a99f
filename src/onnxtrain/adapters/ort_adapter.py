"""Adapters for stock onnxruntime: a base file with inputs for them, and ``.onnx_adapter`` files.

Models written beside the file they came from: its external data are referred to, not copied.
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
from onnxtrain.graph.io.external_data import STORED_TENSOR, StoredTensor
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.importer.parameters import PARAMETERS
from onnxtrain.runtime.ort_values import write_adapter

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Adapted


def save_with_external_references(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model; tensors that lie in files of the same folder stay there.

    If some lie elsewhere, all are written anew, so that the model can be moved with its data.
    """
    folder = Path(os.path.abspath(os.fsdecode(path))).parent
    places = {n: _external_location(x) for n, x in model.graph.initializers.items()}
    if not any(p is not None and Path(p.file).parent == folder for p in places.values()):
        save(model, path)
        return
    work = model.clone()
    for name, x in work.graph.initializers.items():
        place, tensor = places[name], x.const_value
        if place is None or tensor is None or Path(place.file).parent != folder:
            continue
        x.const_value = ir.ExternalTensor(
            Path(place.file).name,
            place.offset,
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
    save_with_external_references(base_with_inputs(adapted), target)
    return target


def base_with_inputs(adapted: Adapted) -> ir.Model:
    """Return the model whose factors are inputs with empty defaults, and whose scaling is 1."""
    model = adapted.plain.clone()
    units = {
        u.module: u for u in find_target_modules(find_base_layers(model.graph), adapted.family)
    }
    plans = [AdapterSpec(units[a.module], 0, 0.0, False) for a in adapted.adapters]
    start = {n: np.zeros(s) for p in plans for n, s in zip(p.names, p.shapes, strict=True)}
    attach_adapters(model, plans, start, 0.0)
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
