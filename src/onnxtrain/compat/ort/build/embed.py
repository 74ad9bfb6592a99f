"""The manifest inside a model file, which is all that the old entry points get to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.build.training_models import Built
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, WeightSpec

KEY = "onnxtrain"
INITIAL_LR = 1e-3


def manifest_of(
    built: Built,
    models: Sequence[ModelSpec] = (),
    state: Sequence[StateSpec] = (),
    optimizer: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the description of the models of a training run."""
    return Manifest(
        models=(*built.specs, *models),
        parameters=tuple(weight(t) for t in built.trainable),
        # What training does not change is kept beside the running statistics.
        buffers=tuple(weight(t) for t in (*built.frozen, *built.buffers)),
        state=tuple(state),
        optimizer=dict(optimizer or {"name": "none", "lr": INITIAL_LR}),
        loss={"output": built.specs[0].outputs[0].name, "name": "onnxblock"},
        options={"compat": "onnxruntime.training", "mode": "as-is"},
    )


def weight(tensor: onnx.TensorProto) -> WeightSpec:
    """Return the manifest's entry of a parameter or buffer."""
    dtype = ir.DataType(tensor.data_type).numpy().name
    return WeightSpec(tensor.name, dtype, tuple(tensor.dims))


def embed(model: onnx.ModelProto, manifest: Manifest) -> None:
    """Write the manifest into a model's metadata."""
    kept = [p for p in model.metadata_props if p.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=KEY, value=manifest.to_json(hashes=False))
