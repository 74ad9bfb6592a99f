"""Checkpoints of parameters that a TrainingBlock found."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.compat.ort.state import Store


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write parameters to a file; only their names if ``nominal_checkpoint``."""
    if parameters is None:
        raise OrtError("No checkpoint parameters provided.")
    trainable, frozen = parameters
    arrays = [
        {t.name: ir.serde.deserialize_tensor(t).numpy() for t in tensors}
        for tensors in (trainable, frozen, getattr(parameters, "buffers", ()))
    ]
    store = Store.of(*arrays)
    if nominal_checkpoint:
        store = store.nominal_copy()
    store.save(path_to_checkpoint)


def load_checkpoint_to_model(
    path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto
) -> None:
    """Overwrite the initializers of ``model`` that the checkpoint has."""
    store = Store.load(path_to_checkpoint)
    for tensor in model.graph.initializer:
        array = store.values.get(tensor.name)
        if array is None:
            continue
        if tuple(tensor.dims) != array.shape:
            raise OrtError(
                f"{tensor.name} has shape {list(array.shape)} in the checkpoint and "
                f"{list(tensor.dims)} in the model"
            )
        doc = tensor.doc_string
        tensor.CopyFrom(ir.serde.serialize_tensor(ir.Tensor(array, name=tensor.name)))
        tensor.doc_string = doc
