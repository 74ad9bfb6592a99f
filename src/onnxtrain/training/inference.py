"""Inference with the current weights: prediction, export, and loading weights by name.

:class:`Predictor` runs the inference model, :func:`export` writes it to a file, and
:func:`match_weights` matches a state_dict to the parameters and buffers of a model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.graphs import dtype_from_name
from onnxtrain.errors import CheckpointError, OnnxTrainError, by_caller
from onnxtrain.graph.io import save as save_model
from onnxtrain.lowering.lower import lower
from onnxtrain.manifest import Manifest
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import Device, import_onnxruntime
from onnxtrain.runtime.feeds import to_array

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

ReadTensor = Callable[[str], np.ndarray]


class Predictor:
    """Runs the inference model with weights as inputs, so that one session serves all steps.

    Some kernels of quantized contrib operators compute wrong results if their scales are not
    constants. Such weights stay initializers, and a change of them creates a new session.
    """

    def __init__(self, artifacts: Artifacts, *, device: str | Device, threads: int | None) -> None:
        spec = artifacts.manifest.model("infer")
        if spec is None:
            raise CheckpointError("these artifacts have no infer model\nhint: build them again")
        self.spec = spec
        self._names = [t.name for t in spec.outputs]
        self._device, self._threads = device, threads
        types = {n: dtype_from_name(d) for n, d in _weight_types(artifacts).items()}
        try:
            self._model, self._weights, self._constants = _weights_as_inputs(
                load_inference_model(artifacts), types
            )
        except (RuntimeError, ValueError, TypeError) as error:  # SerdeError is a RuntimeError
            raise CheckpointError(
                f"{self.spec.file}: not a valid model\nhint: build the artifacts again"
            ) from error
        self._source = artifacts.source("infer")
        self._built_with: dict[str, bytes] | None = None
        self._session: Any = None

    def run(self, feeds: dict[str, np.ndarray], read: ReadTensor) -> dict[str, np.ndarray]:
        """Return the outputs by name."""
        self._refresh(read)
        weights = {n: read(n).astype(t, copy=False) for n, t in self._weights.items()}
        feeds = {**feeds, **weights}
        return dict(zip(self._names, runtime.run(self._session, self._names, feeds), strict=True))

    def _refresh(self, read: ReadTensor) -> None:
        """Create the session if there is none, or if weights inside it have changed."""
        now = {n: stored_bytes(t, read(n)) for n, t in self._constants.items()}
        if now == self._built_with:
            return
        for name, tensor in self._constants.items():
            tensor.raw_data = now[name]
        data = runtime.with_weights_folder(self._source, self._model.SerializeToString())
        self._session = runtime.create(
            data, device=self._device, threads=self._threads, as_shipped=True
        )
        self._built_with = now


def load_inference_model(artifacts: Artifacts) -> onnx.ModelProto:
    """Return the inference model as it was built, without external weights."""
    return runtime.load_graph(artifacts.source("infer"))


def trained_model(artifacts: Artifacts, read: ReadTensor) -> onnx.ModelProto | ir.Model:
    """Return the inference model with the weights that ``read`` returns.

    A model with external weights is an ``ir.Model``, which maps the file: a protobuf message is
    limited to 2 GiB.
    """
    model = load_inference_model(artifacts)
    del model.metadata_props[:]  # the manifest describes the artifacts, not this file
    if any(t.external_data for t in model.graph.initializer):
        return _with_mapped_weights(artifacts, model, read)
    by_name = {t.name: t for t in model.graph.initializer}
    for name in _weight_types(artifacts):
        if name in by_name:
            by_name[name].raw_data = stored_bytes(by_name[name], read(name))
    return model


def _with_mapped_weights(
    artifacts: Artifacts, model: onnx.ModelProto, read: ReadTensor
) -> ir.Model:
    source = artifacts.source("infer")
    folder = (
        source.folder if isinstance(source, runtime.ModelWithWeightsFolder) else artifacts.directory
    )
    trained = _weight_types(artifacts)
    whole = ir.from_proto(model)
    for name, x in whole.graph.initializers.items():
        if name in trained and x.const_value is not None:
            dtype = x.const_value.dtype
            array = np.ascontiguousarray(read(name).astype(dtype.numpy(), copy=False))
            x.const_value = ir.Tensor(array, dtype, name=name)
        elif isinstance(x.const_value, ir.ExternalTensor):
            x.const_value.base_dir = str(folder)
    return whole


def fold_constants(model: onnx.ModelProto | ir.Model) -> onnx.ModelProto:
    """Return the model after onnxruntime's optimizations to standard operators."""
    if isinstance(model, ir.Model):
        raise OnnxTrainError(
            "cannot fold a model with external weights\n"
            f"hint: export without {by_caller('fold', '--fold')}"
        )
    ort = import_onnxruntime()
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = os.path.join(folder, "folded.onnx")
        runtime.create(model.SerializeToString(), options=options)
        optimized = onnx.load(options.optimized_model_filepath)
    used = {node.domain for node in optimized.graph.node}
    imports = [o for o in optimized.opset_import if o.domain in used | {""}]
    del optimized.opset_import[:]
    optimized.opset_import.extend(imports)
    return optimized


def _weight_types(artifacts: Artifacts) -> dict[str, str]:
    manifest = artifacts.manifest
    return {w.name: w.dtype for w in (*manifest.parameters, *manifest.buffers)}


def stored_bytes(tensor: onnx.TensorProto, array: np.ndarray) -> bytes:
    """Return the bytes of an array in the type of a file's tensor."""
    dtype = ir.DataType(tensor.data_type).numpy()
    return np.ascontiguousarray(array.astype(dtype, copy=False)).tobytes()


def _weights_as_inputs(
    model: onnx.ModelProto, types: Mapping[str, ir.DataType]
) -> tuple[onnx.ModelProto, dict[str, np.dtype], dict[str, onnx.TensorProto]]:
    """Return a model, the weights that became inputs with types, and those that stay constants."""
    work = ir.from_proto(model)
    fixed = _required_constants(work.graph)
    known = [n for n in types if n in work.graph.initializers]
    inputs: dict[str, np.dtype] = {}
    for name in [n for n in known if n not in fixed]:
        value = work.graph.initializers.pop(name)
        value.const_value = None
        x = _weight_input(work.graph, value, types[name])
        work.graph.inputs.append(x)
        assert x.dtype is not None
        inputs[name] = x.dtype.numpy()
    proto = ir.to_proto(work)
    constants = {t.name: t for t in proto.graph.initializer if t.name in known}
    return proto, inputs, constants


def _weight_input(graph: ir.Graph, weight: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return the input for a weight: the weight itself, or an input that is cast to bfloat16."""
    if dtype == weight.dtype or weight.dtype != ir.DataType.BFLOAT16:
        return weight
    x = ir.Value(name=weight.name, type=ir.TensorType(dtype), shape=weight.shape)
    cast = ir.node("Cast", [x], {"to": weight.dtype})
    (stored,) = cast.outputs
    stored.name, stored.type, stored.shape = f"{weight.name}.stored", weight.type, weight.shape
    for use in list(weight.uses()):
        use.node.replace_input_with(use.idx, stored)
    first = next(iter(graph), None)
    if first is None:
        graph.append(cast)
    else:
        graph.insert_before(first, cast)
    return x


def _required_constants(graph: ir.Graph) -> set[str]:
    """Return the names of all inputs of quantized contrib operators."""
    quantized = (
        node
        for node in graph.all_nodes()
        if node.domain not in ("", "ai.onnx")
        and any(x is not None and _is_integer_weight(x) for x in node.inputs)
    )
    return {x.name or "" for node in quantized for x in node.inputs if x is not None}


def _is_integer_weight(x: ir.Value) -> bool:
    dtype = x.dtype if x.const_value is None else x.const_value.dtype
    return x.is_initializer() and dtype is not None and not dtype.is_floating_point()


def export(
    trainer: Trainer,
    path: str | os.PathLike[str],
    read: ReadTensor,
    *,
    ema: bool = False,
    fold: bool = False,
    opset: int | None = None,
) -> None:
    """Write the inference model with the weights that ``read`` returns.

    Args:
        trainer: has the model.
        path: of the file.
        read: returns a parameter, buffer or state tensor.
        ema: write the moving average of the weights.
        fold: fold constants; see :meth:`onnxtrain.Trainer.export`.
        opset: opset version of the file; the model's own by default.
    """
    averages = _ema_names(trainer.manifest) if ema else {}
    model = trained_model(trainer.artifacts, lambda name: read(averages.get(name, name)))
    if opset is not None:
        model = lower(model, opset=opset)
    save_model(fold_constants(model) if fold else model, path)


def _ema_names(manifest: Manifest) -> dict[str, str]:
    """Return the names of moving averages by the names of their weights."""
    if manifest.options.get("ema") is None:
        raise OnnxTrainError(
            "these artifacts have no moving average of weights\nhint: "
            + by_caller("build(..., ema=0.999)", "onnxtrain build ... --ema 0.999")
        )
    slots = {s.name for s in manifest.state}
    return {p.name: f"{p.name}.ema" for p in manifest.parameters if f"{p.name}.ema" in slots}


def match_weights(
    weights: Mapping[str, Any], manifest: Manifest, *, strict: bool
) -> dict[str, np.ndarray]:
    """Return the parameters and buffers of the model that a state_dict contains.

    Args:
        weights: arrays or tensors by name; tied weights under any of their names.
        manifest: describes the model.
        strict: raise an error for unknown and missing names.

    Raises:
        CheckpointError: with the names that are missing, unknown or of another shape.
    """
    known = {w.name: w for w in (*manifest.parameters, *manifest.buffers)}
    tied = {alias: w.name for w in known.values() for alias in w.aliases}
    weights = {**{tied[n]: v for n, v in weights.items() if n in tied}, **weights}
    arrays = {n: to_array(v) for n, v in weights.items() if n in known}
    extra = [n for n in weights if n not in {*known, *tied} and not n.startswith("optim/")]
    missing = [n for n in known if n not in arrays]
    if strict and (extra or missing):
        raise CheckpointError(
            f"weights do not fit: missing {_first_names(missing)}, unknown {_first_names(extra)}\n"
            "hint: strict=False sets those that fit"
        )
    wrong = [
        f"{n!r} has shape {list(a.shape)}, expected {list(known[n].shape)}"
        for n, a in arrays.items()
        if tuple(a.shape) != known[n].shape
    ]
    if wrong:
        raise CheckpointError("weights do not fit:\n  " + "\n  ".join(wrong[:5]))
    return arrays


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
