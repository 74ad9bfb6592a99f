"""Training artifacts in one call: ``generate_artifacts``."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.ort import onnxblock
from onnxtrain.compat.ort.errors import OrtError, OrtIndexError, OrtTypeError, as_ort_errors
from onnxtrain.compat.ort.models import (
    INITIAL_LR,
    Built,
    TensorOptimizer,
    domains_of,
    embed,
    manifest_of,
    optimizer_model,
    tensor_optimizer_of,
    write_ort_format,
)
from onnxtrain.compat.ort.onnxblock.model import opset_of
from onnxtrain.compat.ort.onnxblock.optim.optim import ClipGradNorm, OptimizerBlock
from onnxtrain.compat.ort.state import Store
from onnxtrain.graph.io import load, save

USE_PATH_THRESHOLD = 2147483648
"""Bytes from which on a model must be given by its path."""


class LossType(enum.Enum):
    """Losses that need no settings."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.Enum):
    """Optimizers that need no settings."""

    AdamW = 1
    SGD = 2


def generate_artifacts(
    model: onnx.ModelProto | str,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | bytes | os.PathLike | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Write training, evaluation and optimizer model, and the checkpoint.

    Args:
        model: the forward model, or its path.
        requires_grad: names of initializers to train; inputs may be named too.
        frozen_params: names of initializers that are kept in the checkpoint and not trained. All
            others stay in the graphs.
        loss: a kind of loss, a block that is called with the names of the model's outputs, or
            ``None`` if the first output is the loss.
        optimizer: a kind of optimizer, a block, or ``None`` for no optimizer model.
        artifact_directory: where to write; the working directory unless given.
        prefix: in front of every file name.
        ort_format: write each model in onnxruntime's own format, too.
        custom_op_library: a library of operators that the model uses.
        additional_output_names: values that training and evaluation model give after the loss.
        nominal_checkpoint: also write ``nominal_checkpoint``, which has names and no values.
        loss_input_names: what the loss is called with, instead of all outputs.
    """
    base = _read(model, any_domain=custom_op_library is not None)
    loss_block = _loss_block(loss)
    optim_block = _optimizer_block(optimizer)
    _check_lists(requires_grad, frozen_params, additional_output_names)
    block = _Training(loss_block, loss_input_names, additional_output_names or [])
    for name in requires_grad or ():
        block.requires_grad(name)
    for name in frozen_params or ():
        block.requires_grad(name, False)
    library = None if custom_op_library is None else os.fsdecode(custom_op_library)
    scope = contextlib.nullcontext() if library is None else onnxblock.custom_op_library(library)
    with onnxblock.base(base), scope:
        block(*(y.name for y in base.graph.output))
    built = block.built
    assert built is not None
    if optim_block is not None and not built.trainable:
        raise OrtIndexError(
            "The optimizer has no trainable parameters\nhint: name some in requires_grad"
        )
    flat = None if optim_block is None else _flat(optim_block, block, opset_of(base))
    folder = Path.cwd() if artifact_directory is None else Path(os.fsdecode(artifact_directory))
    paths = _write(folder, prefix, built, flat, optim_block, nominal_checkpoint)
    if ort_format:
        for path in paths:
            write_ort_format(path, library)


class _Training(onnxblock.TrainingBlock):
    """A loss on the outputs of the model, and more outputs after it."""

    loss_name = "loss"

    def __init__(self, loss: onnxblock.Block, inputs: list[str] | None, outputs: list[str]) -> None:
        super().__init__()
        self._loss, self._inputs, self._outputs = loss, inputs, outputs

    def build(self, *names: str) -> tuple[str, ...]:
        output_names = self._loss(*(self._inputs or names))
        # Without a loss every output passes through; only the first one is the loss.
        first = (output_names,) if isinstance(output_names, str) else tuple(output_names)
        return tuple(dict.fromkeys([*first, *self._outputs]))


def _read(model: onnx.ModelProto | str, *, any_domain: bool) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        if model.ByteSize() > USE_PATH_THRESHOLD:
            raise OrtError("This model is > 2GB. Please pass in a path to the ONNX file instead.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise OrtError("Please pass in either a string or an ONNX ModelProto for the model.")
    with as_ort_errors():
        domains = domains_of(model) if any_domain else ()
        work = load(model, allow_domains=domains)
        ir.external_data.load_to_model(work)
        return ir.to_proto(work)


def _loss_block(loss: LossType | onnxblock.Block | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        return getattr(onnxblock.loss, loss.name)()
    if not isinstance(loss, onnxblock.Block):
        raise OrtError(
            f"Unknown loss provided {type(loss)}. Expected loss to be either one of "
            "onnxruntime.training.artifacts.LossType or onnxruntime.training.onnxblock.Block."
        )
    return loss


def _optimizer_block(optimizer: OptimType | onnxblock.Block | None) -> onnxblock.Block | None:
    if optimizer is None or isinstance(optimizer, onnxblock.Block):
        return optimizer
    if isinstance(optimizer, OptimType):
        return getattr(onnxblock.optim, optimizer.name)()
    raise OrtTypeError(
        f"Unknown optimizer provided {type(optimizer)}. Expected optimizer to be either one of "
        "onnxruntime.training.artifacts.OptimType or onnxruntime.training.onnxblock.Block."
    )


def _check_lists(
    requires_grad: list[str] | None, frozen_params: list[str] | None, outputs: list[str] | None
) -> None:
    both = sorted(set(requires_grad or ()) & set(frozen_params or ()))
    if both:
        raise OrtError(
            "A parameter cannot be frozen and require gradient computation at the same time "
            f"{', '.join(both)}"
        )
    if outputs and not isinstance(outputs, list):
        raise OrtError(
            f"Unknown type provided for additional output names {type(outputs)}. "
            "Expected additional output names to be a list of strings."
        )


def _flat(block: onnxblock.Block, training: _Training, opset: int) -> TensorOptimizer:
    """Return the flat form of an optimizer: the library's own, or a wrapped one."""
    assert training.built is not None
    weights = manifest_of(training.built).parameters
    clip = block.clip_grad if isinstance(block, OptimizerBlock) else None
    if type(block) in (onnxblock.optim.AdamW, onnxblock.optim.SGD) and (
        clip is None or type(clip) is ClipGradNorm
    ):
        assert isinstance(block, OptimizerBlock)
        return optimizer_model(block.settings, getattr(clip, "max_norm", None), weights, opset)
    with onnxblock.empty_base(opset_version=max(opset, 13)) as accessor:
        block(training.parameters())
        made = (
            block.to_model_proto() if isinstance(block, onnxblock.ForwardBlock) else accessor.model
        )
    return tensor_optimizer_of(made, weights)


def _write(
    folder: Path,
    prefix: str,
    built: Built,
    flat: TensorOptimizer | None,
    block: onnxblock.Block | None,
    nominal: bool,
) -> list[Path]:
    """Write the files; return the paths of the models."""
    models = [built.training, built.evaluation]
    names = ["training_model.onnx", "eval_model.onnx"]
    specs, state, settings = [], [], {}
    if flat is not None:
        proto, spec, state = flat
        models.append(proto)
        names.append("optimizer_model.onnx")
        specs.append(spec)
        if isinstance(block, OptimizerBlock):
            chosen = block.settings
            settings = {"name": type(chosen).__name__, **dataclasses.asdict(chosen)}
        settings = {"name": type(block).__name__, "lr": INITIAL_LR, **settings}
    manifest = manifest_of(built, specs, state, settings)
    files = tuple(dataclasses.replace(m, file=prefix + m.file) for m in manifest.models)
    manifest = dataclasses.replace(manifest, models=files, checkpoint=f"{prefix}checkpoint")
    paths = [folder / f"{prefix}{name}" for name in names]
    store = Store.of(*(_arrays(t) for t in (built.trainable, built.frozen, built.buffers)))
    store.manifest = manifest.to_dict(hashes=False)
    for s in state:
        store.set_state(s.parameter, s.slot, np.full(s.shape, s.init, s.dtype))
    with as_ort_errors():
        for model, path in zip(models, paths, strict=True):
            embed(model, manifest)
            save(model, path)
        store.save(folder / f"{prefix}checkpoint")
        if nominal:
            store.nominal_copy().save(folder / f"{prefix}nominal_checkpoint")
    return paths


def _arrays(tensors: list[onnx.TensorProto]) -> dict:
    return {t.name: ir.serde.deserialize_tensor(t).numpy() for t in tensors}
