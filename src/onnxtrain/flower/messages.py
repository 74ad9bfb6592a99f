"""The names of Flower that this package uses, from one place.

Artifacts that an app is given, or finds by its context.

Named tensors as Flower's records, and back.

What a round changed, as named tensors.

>>> before, after = {"w": np.float32([3.0])}, {"w": np.float32([1.0])}
>>> pseudo_gradient(before, after)
{'w': array([2.], dtype=float32)}
>>> accumulated([({"w": np.float32([2.0])}, 1), ({"w": np.float32([5.0])}, 3)])
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
        f"Flower is not installed, or not a release from 1.40 on: {error}\n"
        "hint: pip install 'onnxtrain[flower]'"
    ) from error


ArtifactsSource = (
    Artifacts | str | os.PathLike[str] | Callable[[Any], Artifacts | str | os.PathLike[str]]
)
"""Artifacts, their directory, or a function from Flower's ``Context`` to one of these."""


def resolve_artifacts(
    place: ArtifactsSource, context: Context
) -> Artifacts | str | os.PathLike[str]:
    """Return the artifacts or the directory that an app is to take."""
    return place if isinstance(place, Artifacts | str | os.PathLike) else place(context)


EXAMPLES = "num-examples"
"""The metric that strategies weigh replies with."""
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def exchanged_tensors(manifest: Manifest, *, statistics: bool) -> tuple[WeightSpec, ...]:
    """Return the tensors that go over the wire: what is trained, and running statistics if asked.

    What ``build`` froze stays where it is.
    """
    return (*manifest.parameters, *(manifest.buffers if statistics else ()))


def to_record(tensors: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of the tensors, in their order."""
    return ArrayRecord({n: Array(np.ascontiguousarray(a)) for n, a in tensors.items()})


def from_record(record: ArrayRecord, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the tensors of a record that came from the server.

    Raises:
        ShapeError: naming a tensor that is missing, unknown or of another shape.
    """
    parameters = {w.name: w for w in manifest.parameters}
    buffers = {w.name: w for w in manifest.buffers}
    unknown = [n for n in record if n not in parameters and n not in buffers]
    missing = [n for n in parameters if n not in record]
    if unknown or missing:
        differences = [
            *(f"{n!r} is unknown here" for n in unknown),
            *(f"{n!r} is missing" for n in missing),
        ]
        raise ShapeError(
            f"the server's tensors are not those of these artifacts: {'; '.join(differences)}\n"
            "hint: server and clients need artifacts of the same build"
        )
    tensors: dict[str, np.ndarray] = {}
    for name in record:
        spec = parameters.get(name) or buffers[name]
        array = record[name].numpy()
        if array.shape != tuple(spec.shape):
            raise ShapeError(f"{name!r} has shape {array.shape}, not {tuple(spec.shape)}")
        tensors[name] = array.astype(spec.dtype, copy=False)
    return tensors


def pseudo_gradient(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return ``before - after`` by name: what server optimizers take for a gradient."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ShapeError(f"tensors that only one side has: {', '.join(map(repr, odd))}")
    return {n: np.asarray(before[n] - after[n]) for n in before}


def weighted_mean(
    updates: Iterable[tuple[Mapping[str, np.ndarray], float]],
) -> dict[str, np.ndarray]:
    """Return the mean of updates, each with its weight, summed in float64."""
    sums: dict[str, np.ndarray] = {}
    types: dict[str, np.dtype] = {}
    total = 0.0
    for update, weight in updates:
        if sums and sums.keys() != update.keys():
            odd = sorted(sums.keys() ^ update.keys())
            raise ShapeError(f"tensors that not every update has: {', '.join(map(repr, odd))}")
        total += weight
        for name, array in update.items():
            part = array.astype(np.float64) * weight
            sums[name] = sums[name] + part if name in sums else part
            types.setdefault(name, array.dtype)
    if not total > 0:
        raise ShapeError("there is no update with a weight above zero")
    return {n: np.asarray(a / total, types[n]) for n, a in sums.items()}
