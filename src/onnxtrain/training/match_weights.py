"""Weights from elsewhere, matched to a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.manifest import Manifest
from onnxtrain.runtime.feeds import to_array


def fitting(
    weights: Mapping[str, Any], manifest: Manifest, *, strict: bool
) -> dict[str, np.ndarray]:
    """Return the parameters and buffers of the model that are among some weights.

    Args:
        weights: names to arrays or tensors; tied weights under any of their names.
        manifest: describes the model.
        strict: refuse names that the model has not, and missing ones.

    Raises:
        CheckpointError: naming what is missing, unknown or of another shape.
    """
    known = {w.name: w for w in (*manifest.parameters, *manifest.buffers)}
    tied = {alias: w.name for w in known.values() for alias in w.aliases}
    weights = {**{tied[n]: v for n, v in weights.items() if n in tied}, **weights}
    arrays = {n: to_array(v) for n, v in weights.items() if n in known}
    extra = [n for n in weights if n not in {*known, *tied} and not n.startswith("optim/")]
    missing = [n for n in known if n not in arrays]
    if strict and (extra or missing):
        raise CheckpointError(
            f"weights do not fit: missing {_few(missing)}, unknown {_few(extra)}\n"
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


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
