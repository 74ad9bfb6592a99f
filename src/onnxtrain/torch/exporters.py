"""torch's two exporters, called so that nothing of the module gets lost."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io import load

Axes = Sequence[Mapping[int, str]]
"""For each input the axes whose size is symbolic, with the name of the size."""


class ExportError(OnnxTrainError):
    """torch could not export the module, or not without damage."""


def dynamo(module: nn.Module, inputs: Sequence[Any], names: Sequence[str], axes: Axes) -> ir.Model:
    """Export with the modern exporter; ``optimize=False``, or a third of the parameters is gone."""
    options: dict[str, Any] = {}
    if any(axes):
        wanted = tuple(dict(a) or None for a in axes)
        options["dynamic_shapes"] = (wanted,) if _has_var_positional(module) else wanted
    with suppress_output():
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
    named = {n: dict(a) for n, a in zip(names, axes, strict=True) if a}
    with suppress_output():
        torch.onnx.export(
            module,
            tuple(inputs),
            buffer,  # pyright: ignore[reportArgumentType] - torch's annotation forgets file objects
            dynamo=False,
            training=mode.PRESERVE,
            do_constant_folding=False,
            dynamic_axes=named or None,
            input_names=list(names),
        )
    return load(buffer.getvalue())


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Hold back warnings, log lines and prints of the exporters."""
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
