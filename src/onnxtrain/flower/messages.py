"""Convert between named tensors and Flower's records, and combine client updates.

All imports from Flower are here, so a missing or old release raises one error with a hint.

>>> before, after = {"w": np.float32([3.0])}, {"w": np.float32([1.0])}
>>> pseudo_gradient(before, after)
{'w': array([2.], dtype=float32)}
>>> weighted_mean([({"w": np.float32([2.0])}, 1), ({"w": np.float32([5.0])}, 3)])
{'w': array([4.25], dtype=float32)}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import MissingExtraError, ShapeError
from onnxtrain.manifest import Manifest, WeightSpec

try:
    from flwr.app import (  # noqa: F401
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp  # noqa: F401
    from flwr.serverapp import Grid, ServerApp  # noqa: F401
    from flwr.serverapp.strategy import FedAvg, Result, Strategy  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"cannot import Flower 1.40 or later: {error}\nhint: pip install 'onnxtrain[flower]'"
    ) from error


ArtifactsSource = (
    Artifacts | str | os.PathLike[str] | Callable[[Any], Artifacts | str | os.PathLike[str]]
)
"""Artifacts, their directory, or a function of Flower's ``Context`` that returns one of these."""


def resolve_artifacts(
    source: ArtifactsSource, context: Context
) -> Artifacts | str | os.PathLike[str]:
    """Return the artifacts or their directory; call a function of the context."""
    return source if isinstance(source, Artifacts | str | os.PathLike) else source(context)


EXAMPLES = "num-examples"
"""The metric that strategies weight replies by."""
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def exchanged_tensors(manifest: Manifest, *, statistics: bool) -> tuple[WeightSpec, ...]:
    """Return the tensors exchanged each round: trainable parameters, optionally running statistics.

    Frozen parameters are never sent.
    """
    return (*manifest.parameters, *(manifest.buffers if statistics else ()))


def to_record(tensors: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of the tensors, in order."""
    return ArrayRecord({n: Array(np.ascontiguousarray(a)) for n, a in tensors.items()})


def from_record(record: ArrayRecord, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the tensors of a record from the server.

    Raises:
        ShapeError: if a tensor is missing, unknown or has another shape.
    """
    parameters = {w.name: w for w in manifest.parameters}
    buffers = {w.name: w for w in manifest.buffers}
    unknown = [n for n in record if n not in parameters and n not in buffers]
    missing = [n for n in parameters if n not in record]
    if unknown or missing:
        differences = [
            *(f"{n!r} is unknown" for n in unknown),
            *(f"{n!r} is missing" for n in missing),
        ]
        raise ShapeError(
            f"the server's tensors do not match the artifacts: {'; '.join(differences)}\n"
            "hint: use artifacts of the same build on the server and all clients"
        )
    tensors: dict[str, np.ndarray] = {}
    for name in record:
        spec = parameters.get(name) or buffers[name]
        array = record[name].numpy()
        if array.shape != tuple(spec.shape):
            raise ShapeError(f"{name!r} has shape {array.shape}, expected {tuple(spec.shape)}")
        tensors[name] = array.astype(spec.dtype, copy=False)
    return tensors


def pseudo_gradient(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return ``before - after`` by name: the gradient that server optimizers use."""
    if before.keys() != after.keys():
        unmatched = sorted(before.keys() ^ after.keys())
        raise ShapeError(
            f"before and after have different tensors: {', '.join(map(repr, unmatched))}"
        )
    return {n: np.asarray(before[n] - after[n]) for n in before}


def weighted_mean(
    updates: Iterable[tuple[Mapping[str, np.ndarray], float]],
) -> dict[str, np.ndarray]:
    """Return the weighted mean of updates, accumulated in float64."""
    sums: dict[str, np.ndarray] = {}
    types: dict[str, np.dtype] = {}
    total = 0.0
    for update, weight in updates:
        if sums and sums.keys() != update.keys():
            unmatched = sorted(sums.keys() ^ update.keys())
            raise ShapeError(f"updates have different tensors: {', '.join(map(repr, unmatched))}")
        total += weight
        for name, array in update.items():
            weighted = array.astype(np.float64) * weight
            sums[name] = sums[name] + weighted if name in sums else weighted
            types.setdefault(name, array.dtype)
    if not total > 0:
        raise ShapeError("no update has a weight above zero")
    return {n: np.asarray(a / total, types[n]) for n, a in sums.items()}
