"""Models written beside the file they came from: its external data are referred to, not copied."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from onnxtrain.graph.io import save
from onnxtrain.graph.io.atomic import content, write_files
from onnxtrain.graph.io.external_data import STORED, Stored


def save_referring(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model; tensors that lie in files of the same folder stay there.

    If some lie elsewhere, all are written anew, so that the model can be moved with its data.
    """
    folder = Path(os.path.abspath(os.fsdecode(path))).parent
    places = {n: _place(x) for n, x in model.graph.initializers.items()}
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
    write_files(repr(os.fsdecode(path)), {os.path.abspath(os.fsdecode(path)): content(data)})


def _place(x: ir.Value) -> Stored | None:
    return None if x.const_value is None else x.const_value.meta.get(STORED)


__all__ = ["save_referring"]
