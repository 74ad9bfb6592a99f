"""What a checkpoint says besides tensors, checked before any of it is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from onnxtrain.errors import CheckpointError, OnnxTrainError

SEEDS = 1 << 24
"""float32 holds whole numbers below exactly."""
_LARGEST_LR = float(np.finfo(np.float32).max)
_STEPS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far training has come."""

    lr: float
    step: int
    seed: int
    properties: dict[str, int | float | str]

    def read(self, meta: Mapping[str, Any], label: str) -> Progress:
        """Return what the metadata of a checkpoint says, and this where it says nothing.

        Raises:
            CheckpointError: naming every entry that cannot be.
        """
        lr, step, seed = (meta.get(n, getattr(self, n)) for n in ("lr", "step", "seed"))
        properties = meta.get("properties", {})
        problems: list[str] = []
        if not _is_lr(lr):
            problems.append(f"'lr' is {lr!r}, not a finite number from 0 on")
        for name, value, end in (("step", step, _STEPS), ("seed", seed, SEEDS)):
            if type(value) is not int or not 0 <= value < end:
                problems.append(f"{name!r} is {value!r}, not a whole number in [0, {end})")
        if not _are_properties(properties):
            problems.append(f"'properties' is {properties!r}, not numbers and texts by name")
        if problems:
            raise CheckpointError(f"{label}: the metadata is wrong:\n  " + "\n  ".join(problems))
        return Progress(float(lr), step, seed, dict(properties))


class Loaded(NamedTuple):
    """A checkpoint that fits a trainer, not taken over yet."""

    arrays: dict[str, np.ndarray]
    progress: Progress
    meta: dict[str, Any]


def check_lr(value: Any, name: str) -> float:
    """Return a learning rate as a number.

    Raises:
        OnnxTrainError: if it is negative, infinite or NaN, or not a number.
    """
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if not _is_lr(value):
        raise OnnxTrainError(f"{name} must be a finite number from 0 on: {value!r}")
    return float(value)


def _is_lr(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= _LARGEST_LR


def _are_properties(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(v, int | float | str) for v in cast(Mapping[str, Any], value).values())
