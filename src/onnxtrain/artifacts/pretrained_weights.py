"""Weights from elsewhere, put into a model before anything is built of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load

ALIASES = "onnxtrain.aliases"
"""Metadata of a model: other names of its tied weights, a JSON object of lists."""


def aliases_of(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied weights, as the exporter recorded them.

    Raises:
        PrepareError: if the record is damaged.
    """
    text = model.metadata_props.get(ALIASES, "{}")
    try:
        aliases = {name: tuple(others) for name, others in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: {error}") from error
    if not all(isinstance(other, str) for others in aliases.values() for other in others):
        raise PrepareError(f"the metadata {ALIASES!r} of the model is damaged: names are strings")
    return aliases


def load_weights(
    model: Source,
    weights: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
) -> onnx.ModelProto:
    """Return the model with weights of a state_dict or a safetensors file.

    ``Trainer.load_weights`` sets what is trained; this sets all initializers, also those to freeze.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        weights: names to arrays or torch tensors, or a path.
        strict: refuse names that the model has not, and float initializers that get no weight.

    Raises:
        CheckpointError: if names or shapes do not fit.
    """
    if isinstance(weights, str | os.PathLike):
        weights = load_checkpoint(weights)[0]
    work = load(model)
    known = work.graph.initializers
    extra = [n for n in weights if n not in known and not n.startswith("optim/")]
    missing = [n for n, x in known.items() if n not in weights and S.is_float(x)]
    if strict and (extra or missing):
        raise CheckpointError(
            f"weights do not fit: missing {_few(missing)}, unknown {_few(extra)}\n"
            "hint: strict=False sets those that fit"
        )
    value: Any
    for name, value in weights.items():
        if name not in known:
            continue
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
        old = known[name].const_value
        assert old is not None
        if tuple(array.shape) != tuple(old.numpy().shape):
            raise CheckpointError(
                f"{name!r} has shape {list(array.shape)}, expected {list(old.numpy().shape)}"
            )
        known[name].const_value = ir.Tensor(array.astype(old.numpy().dtype), old.dtype, name=name)
    return ir.to_proto(work)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
