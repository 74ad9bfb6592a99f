"""Export of zoo models by today's torch, kept under .cache/zoo between runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from .models import ZooModel

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "zoo"
BATCH_NORM_REASON = "dynamo exports a training BatchNorm in inference form"


@dataclass(frozen=True)
class Recipe:
    """How one model was exported in one mode."""

    exporter: str
    reason: str
    training: bool
    dynamic: bool
    opset: int | None


@dataclass(frozen=True)
class Exported:
    """The ONNX model, how it was made, and which initializer holds each torch parameter."""

    model: onnx.ModelProto
    recipe: Recipe
    names: dict[str, str]


class ExportError(RuntimeError):
    """The exported model does not represent the module."""


def recipe_for(entry: ZooModel, mode: str) -> Recipe:
    """The exporter that is right for this model and mode."""
    training = mode == "train"
    reason = entry.legacy or (BATCH_NORM_REASON if training and entry.batch_norm else "")
    exporter = "legacy" if reason else "dynamo"
    return Recipe(exporter, reason, training, not entry.static, entry.opset)


def export(entry: ZooModel, mode: str = "eval") -> Exported:
    """``entry`` as ONNX, from the cache when its source and the exporter have not changed."""
    recipe = recipe_for(entry, mode)
    module = entry.build(mode)
    path = CACHE / f"{entry.name}-{mode}-{_digest(entry, mode, recipe)}.onnx"
    if path.exists():
        model = onnx.load_from_string(path.read_bytes())
    else:
        with _quiet():
            data = _run_exporter(entry, module, recipe)
        model = onnx.load_from_string(data)
        CACHE.mkdir(parents=True, exist_ok=True)
        for stale in CACHE.glob(f"{entry.name}-{mode}-*.onnx"):
            stale.unlink(missing_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_bytes(data)
        temporary.replace(path)
    _check_batch(model, entry)
    return Exported(model, recipe, _parameter_names(module, model))


def input_names(entry: ZooModel) -> list[str]:
    """Names for the graph inputs; every exporter gives the same ones."""
    return [f"input_{index}" for index in range(len(entry.draws))]


def _digest(entry: ZooModel, mode: str, recipe: Recipe) -> str:
    parts = [entry.source, entry.name, mode, torch.__version__, onnx.__version__]
    parts += [json.dumps(asdict(recipe)), Path(__file__).read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run_exporter(entry: ZooModel, module: nn.Module, recipe: Recipe) -> bytes:
    inputs = entry.inputs(entry.batches[0])
    names = input_names(entry)
    options: dict = {"input_names": names}
    if recipe.opset is not None:
        options["opset_version"] = recipe.opset
    axes = tuple({0: "batch"} if draw.batched else {} for draw in entry.draws)
    if recipe.exporter == "legacy":
        return _legacy(module, inputs, recipe, dict(zip(names, axes, strict=True)), options)
    if recipe.dynamic:
        options["dynamic_shapes"] = axes
    program = torch.onnx.export(
        module, inputs, dynamo=True, optimize=False, external_data=False, verbose=False, **options
    )
    assert program is not None
    return program.model_proto.SerializeToString()


def _legacy(
    module: nn.Module, inputs: tuple[Tensor, ...], recipe: Recipe, axes: dict, options: dict
) -> bytes:
    buffer = io.BytesIO()
    mode = torch.onnx.TrainingMode.TRAINING if recipe.training else torch.onnx.TrainingMode.EVAL
    torch.onnx.export(
        module,
        inputs,
        buffer,
        dynamo=False,
        training=mode,
        do_constant_folding=False,
        dynamic_axes=axes if recipe.dynamic else None,
        **options,
    )
    return buffer.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the exporter's warnings, log lines and prints."""
    threshold = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(threshold)


def _check_batch(model: onnx.ModelProto, entry: ZooModel) -> None:
    """Raise if an exporter silently fixed the batch of a model that should be dynamic."""
    for value, draw in zip(model.graph.input, entry.draws, strict=True):
        if entry.static or not draw.batched:
            continue
        if not value.type.tensor_type.shape.dim[0].dim_param:
            raise ExportError(f"{entry.name}: the batch axis of {value.name!r} became fixed")


def _parameter_names(module: nn.Module, model: onnx.ModelProto) -> dict[str, str]:
    """Torch name -> initializer name; a tied parameter may be stored under its twin's name."""
    stored = {tensor.name for tensor in model.graph.initializer}
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        found = [alias for alias in aliases[id(parameter)] if alias in stored]
        if len(found) != 1:
            raise ExportError(f"parameter {name!r} is stored as {found or 'nothing'}")
        names[name] = found[0]
    return names
