"""Call torch's two exporters with the options that preserve the module."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.modules import transformer

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io import load

Axes = Sequence[Mapping[int, str]]
"""Symbolic axes of each input: axis -> name of the size."""


class ExportError(OnnxTrainError):
    """torch cannot export the module, or the export does not match the module."""


def dynamo(module: nn.Module, inputs: Sequence[Any], names: Sequence[str], axes: Axes) -> ir.Model:
    """Export with ``torch.export``.

    ``optimize=False``: the exporter's optimizer merges and folds parameters.
    """
    options: dict[str, Any] = {}
    if any(axes):
        shapes = tuple(dict(a) or None for a in axes)
        # torch.export wants the shapes of *args as one nested tuple.
        options["dynamic_shapes"] = (shapes,) if _has_var_positional(module) else shapes
    with suppress_output(), _masks_as_given(), _one_registry():
        program = torch.onnx.export(
            module,
            tuple(inputs),
            dynamo=True,
            optimize=False,
            external_data=False,
            verbose=False,
            input_names=list(names),
            **options,
        )
    assert program is not None
    return load(program.model_proto)


def _has_var_positional(module: nn.Module) -> bool:
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds[:1]


def legacy(module: nn.Module, inputs: Sequence[Any], names: Sequence[str], axes: Axes) -> ir.Model:
    """Export with the tracing exporter, without constant folding."""
    buffer = io.BytesIO()
    mode = torch.onnx.TrainingMode
    dynamic_axes = {n: dict(a) for n, a in zip(names, axes, strict=True) if a}
    with suppress_output(), _masks_as_given():
        torch.onnx.export(
            module,
            tuple(inputs),
            buffer,  # pyright: ignore[reportArgumentType] - the annotation lacks file objects
            dynamo=False,
            training=mode.PRESERVE,
            do_constant_folding=False,
            dynamic_axes=dynamic_axes or None,
            input_names=list(names),
        )
    return _with_unread_inputs(load(buffer.getvalue()), inputs, names)


def _with_unread_inputs(model: ir.Model, inputs: Sequence[Any], names: Sequence[str]) -> ir.Model:
    """Return the model with the inputs that the legacy exporter drops: nothing reads them."""
    known = {x.name: x for x in model.graph.inputs}
    for name, x in zip(names, inputs, strict=True):
        if name not in known and isinstance(x, torch.Tensor):
            array = x.detach().cpu()
            dtype = ir.DataType.BFLOAT16 if x.dtype is torch.bfloat16 else ir.tensor(array).dtype
            known[name] = ir.val(name, dtype, list(x.shape))
    model.graph.inputs[:] = [known[n] for n in names if n in known]
    return model


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """Let ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` use the mask that they get.

    They compare it with a causal mask, to skip it in favor of a faster kernel. ``torch.export``
    cannot trace the comparison; the legacy exporter writes its result and size into the graph.
    """
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:
        yield
        return

    def as_given(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        del mask, size
        return is_causal is True

    transformer._detect_is_causal_mask = as_given
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


_REGISTRIES: dict[Any, Any] = {}


@contextlib.contextmanager
def _one_registry() -> Iterator[None]:
    """Let ``torch.onnx`` build its table of operators once per opset instead of in each export.

    Building it parses 500 functions, which is half the time of exporting a small module. The
    functions themselves are the same objects in each export; an export gets its own table of them.
    Releases of torch without this class build the table each time.
    """
    try:
        module = importlib.import_module("torch.onnx._internal.exporter._registration")
        original: Any = vars(module.ONNXRegistry)["from_torchlib"]
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def from_torchlib(cls: Any, *args: Any, **options: Any) -> Any:
        key = (cls, args, *sorted(options.items()))
        if key not in _REGISTRIES:
            _REGISTRIES[key] = original.__get__(None, cls)(*args, **options)
        registry = copy.copy(_REGISTRIES[key])
        registry.functions = {target: list(some) for target, some in registry.functions.items()}
        return registry

    module.ONNXRegistry.from_torchlib = classmethod(from_torchlib)
    try:
        yield
    finally:
        module.ONNXRegistry.from_torchlib = original


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress warnings, log messages and prints of the exporters."""
    level = logging.root.manager.disable
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
        logging.disable(level)
