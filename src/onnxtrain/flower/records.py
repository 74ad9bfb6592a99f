"""Named tensors as Flower's records, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.flower.api import Array, ArrayRecord
from onnxtrain.manifest import Manifest, WeightSpec

EXAMPLES = "num-examples"
"""The metric that strategies weigh replies with."""
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"


def travelling(manifest: Manifest, *, statistics: bool) -> tuple[WeightSpec, ...]:
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
        told = [
            *(f"{n!r} is unknown here" for n in unknown),
            *(f"{n!r} is missing" for n in missing),
        ]
        raise ShapeError(
            f"the server's tensors are not those of these artifacts: {'; '.join(told)}\n"
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
