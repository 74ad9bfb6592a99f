"""The inference model with the weights of the moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.graph.io import save as save_model
from onnxtrain.lowering.api import lower
from onnxtrain.manifest import Manifest
from onnxtrain.runtime import session as runtime

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

Read = Callable[[str], np.ndarray]


class Predictor:
    """Runs the inference model; weights are inputs, so that the session need not be made again."""

    def __init__(self, artifacts: Artifacts, *, device: str, threads: int | None) -> None:
        spec = artifacts.manifest.model("infer")
        if spec is None:
            raise CheckpointError("these artifacts have no infer model\nhint: build them again")
        self.spec = spec
        self._names = [t.name for t in spec.outputs]
        proto, self._weights = _weights_as_inputs(plain_model(artifacts), _weight_names(artifacts))
        self._session = runtime.create(proto, device=device, threads=threads, as_shipped=True)

    def run(self, feeds: dict[str, np.ndarray], read: Read) -> dict[str, np.ndarray]:
        """Return the outputs by name."""
        feeds = {**feeds, **{n: read(n) for n in self._weights}}
        return dict(zip(self._names, runtime.run(self._session, self._names, feeds), strict=True))


def plain_model(artifacts: Artifacts) -> onnx.ModelProto:
    """Return the inference model as it was built."""
    source = artifacts.source("infer")
    return onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)


def trained_model(artifacts: Artifacts, read: Read) -> onnx.ModelProto:
    """Return the inference model with the weights that ``read`` gives."""
    model = plain_model(artifacts)
    by_name = {t.name: t for t in model.graph.initializer}
    for name in _weight_names(artifacts):
        if name in by_name:
            by_name[name].raw_data = np.ascontiguousarray(read(name)).tobytes()
    del model.metadata_props[:]  # the manifest describes the model that can be trained
    return model


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model after the runtime's own standard-operator optimisations."""
    ort = runtime.runtime()
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = os.path.join(folder, "folded.onnx")
        runtime.create(model.SerializeToString(), options=options)
        optimised = onnx.load(options.optimized_model_filepath)
    used = {node.domain for node in optimised.graph.node}
    kept = [o for o in optimised.opset_import if o.domain in used | {""}]
    del optimised.opset_import[:]
    optimised.opset_import.extend(kept)
    return optimised


def _weight_names(artifacts: Artifacts) -> list[str]:
    manifest = artifacts.manifest
    return [w.name for w in (*manifest.parameters, *manifest.buffers)]


def _weights_as_inputs(model: onnx.ModelProto, names: Sequence[str]) -> tuple[bytes, list[str]]:
    work = ir.from_proto(model)
    moved = [n for n in names if n in work.graph.initializers]
    for name in moved:
        value = work.graph.initializers.pop(name)
        value.const_value = None
        work.graph.inputs.append(value)
    return ir.to_proto(work).SerializeToString(), moved


def export(
    trainer: Trainer,
    path: str | os.PathLike[str],
    *,
    ema: bool = False,
    fold: bool = False,
    opset: int | None = None,
) -> None:
    """Write the inference model with the current weights.

    Args:
        trainer: what was trained.
        path: of the file.
        ema: the moving average of the weights instead.
        fold: compute ahead what depends on weights alone, such as a normalisation after a
            convolution; names of weights may change.
        opset: of the file, if not the model's own.
    """
    averages = _averages(trainer.manifest) if ema else {}
    model = trained_model(trainer.artifacts, lambda name: trainer.view(averages.get(name, name)))
    if opset is not None:
        model = lower(model, opset=opset)
    save_model(folded(model) if fold else model, path)


def _averages(manifest: Manifest) -> dict[str, str]:
    """Return the names of the moving averages by the names of the weights that have one."""
    if manifest.options.get("ema") is None:
        raise OnnxTrainError("no moving average was kept\nhint: build(..., ema=0.999)")
    slots = {s.name for s in manifest.state}
    return {p.name: f"{p.name}.ema" for p in manifest.parameters if f"{p.name}.ema" in slots}
