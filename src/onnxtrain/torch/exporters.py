"""torch's two exporters, called so that nothing of the module gets lost."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io import load

BATCH = "batch"


class ExportError(OnnxTrainError):
    """torch could not export the module, or not without damage."""


def dynamo(
    module: nn.Module, inputs: Sequence[Any], names: Sequence[str], batched: Sequence[bool]
) -> ir.Model:
    """Export with the modern exporter; ``optimize=False``, or a third of the parameters is gone."""
    options: dict[str, Any] = {}
    if any(batched):
        options["dynamic_shapes"] = tuple({0: BATCH} if b else None for b in batched)
    with quiet():
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


def legacy(
    module: nn.Module, inputs: Sequence[Any], names: Sequence[str], batched: Sequence[bool]
) -> ir.Model:
    """Export with the tracing exporter, without constant folding."""
    buffer = io.BytesIO()
    mode = torch.onnx.TrainingMode
    axes = {n: {0: BATCH} for n, b in zip(names, batched, strict=True) if b}
    with quiet():
        torch.onnx.export(
            module,
            tuple(inputs),
            buffer,
            dynamo=False,
            training=mode.TRAINING if module.training else mode.EVAL,
            do_constant_folding=False,
            dynamic_axes=axes or None,
            input_names=list(names),
        )
    return load(buffer.getvalue())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
