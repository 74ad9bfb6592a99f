"""Whether a client's reply may enter the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.flower.api import Array, RecordDict
from onnxtrain.flower.records import EXAMPLES
from onnxtrain.manifest import WeightSpec

_HEADER = 4096  # bytes: more than numpy writes in front of an array
_SHOWN = 3


class UnfitReplyError(OnnxTrainError, ValueError):
    """A client's reply is not what its artifacts allow."""


def checked_arrays(content: RecordDict, specs: Sequence[WeightSpec]) -> dict[str, np.ndarray]:
    """Return the tensors of a reply.

    Sizes are looked at before anything is unpacked.

    Raises:
        UnfitReplyError: naming the tensor that is missing, unknown, too large, of another shape or
            type, or not finite.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"{len(records)} records of arrays, where one is expected")
    wanted = {s.name: s for s in specs}
    _same_names("array", wanted, records[0])
    return {name: _tensor(spec, records[0][name]) for name, spec in wanted.items()}


def _same_names(what: str, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    odd = [f"no {what} {n!r}" for n in wanted if n not in given]
    odd += [f"an unknown {what} {n!r}" for n in given if n not in wanted]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise UnfitReplyError("; ".join(odd[:_SHOWN]) + more)


def _tensor(spec: WeightSpec, array: Array) -> np.ndarray:
    shape = tuple(spec.shape)
    dtype = np.dtype(spec.dtype)
    label = repr(spec.name)
    if tuple(array.shape) != shape or array.dtype != spec.dtype:
        raise UnfitReplyError(
            f"{label} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}"
        )
    most = math.prod(shape) * dtype.itemsize + _HEADER
    if len(array.data) > most:
        raise UnfitReplyError(f"{label} has {len(array.data):,} bytes, more than {most:,}")
    try:
        value = array.numpy()
    except Exception as error:  # damaged files raise anything
        raise UnfitReplyError(f"{label} cannot be read: {error}") from error
    if value.shape != shape or value.dtype != dtype:  # the file may differ from what was announced
        raise UnfitReplyError(f"{label} holds {value.dtype}{list(value.shape)}")
    if not np.isfinite(value).all():
        raise UnfitReplyError(f"{label} has values that are infinite or NaN")
    return value


def checked_metrics(
    content: RecordDict, needed: Sequence[str], most_examples: float
) -> dict[str, Any]:
    """Return the metrics of a reply.

    Raises:
        UnfitReplyError: naming the number that is missing, no number, not finite, or out of range.
    """
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"{len(records)} records of metrics, where one is expected")
    metrics = dict(records[0])
    missing = [n for n in (EXAMPLES, *needed) if n not in metrics]
    if missing:
        raise UnfitReplyError(f"no metric {missing[0]!r}")
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if not math.isfinite(number):
                raise UnfitReplyError(f"metric {name!r} is {number}")
    examples = metrics[EXAMPLES]
    if isinstance(examples, list) or not 0 < examples <= most_examples:
        raise UnfitReplyError(f"{EXAMPLES!r} is {examples}, not a number up to {most_examples:g}")
    return metrics


def distance(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    """Return the joint Euclidean norm of all differences."""
    parts = (np.linalg.norm((after[n].astype(np.float64) - before[n]).ravel()) for n in after)
    return float(math.hypot(*parts))
