"""Artifacts that were built for another device than the one they run on."""

from __future__ import annotations

import warnings

from onnxtrain.manifest import ModelSpec
from onnxtrain.targets import TARGETS


def advise_target(spec: ModelSpec, device: str) -> None:
    """Warn if a GPU runs a model that was built for something else.

    It gives the same numbers, but nodes may run on the CPU, or in forms that are slow on a GPU.
    """
    here = TARGETS.get(device)
    if here is None or not here.gpu or spec.is_for(device):
        return
    warnings.warn(
        f"these artifacts were built for target {spec.target!r} and run on {device!r}: "
        f'build(..., target="{device}") is faster there',
        stacklevel=3,
    )
