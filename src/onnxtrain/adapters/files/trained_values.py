"""Values of adapters after training: from a trainer, a checkpoint or a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError

if TYPE_CHECKING:
    from onnxtrain.adapters.adapted import Adapted


class HasParameters(Protocol):
    """A trainer, or whatever else has parameters by name."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The parameters by name."""
        ...


Weights = HasParameters | Mapping[str, Any] | str | os.PathLike[str] | None
"""A trainer, arrays by name, the path of a checkpoint, or ``None``: as they are in the model."""


def trained_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return the tensors of the adapters by name, in float32; what is not given is as it was.

    Raises:
        CheckpointError: if nothing fits, or a shape does not.
    """
    values = {n: np.asarray(a, np.float32) for n, a in adapted.parameters.items()}
    if weights is None:
        return values
    given = _given(weights)
    known = [n for n in given if n in values]
    if not known:
        few = ", ".join(list(given)[:3]) or "nothing"
        raise CheckpointError(
            f"these weights are not of this model's adapters: they hold {few}\n"
            f"hint: the adapters are called {', '.join(list(values)[:2])} and so on"
        )
    for name in known:
        array = np.asarray(given[name], np.float32)
        if array.shape != values[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {list(array.shape)}, expected {list(values[name].shape)}"
            )
        values[name] = array
    return values


def other_values(adapted: Adapted, weights: Weights) -> dict[str, np.ndarray]:
    """Return weights of the file that trained beside the adapters, by name."""
    if weights is None:
        return {}
    own = adapted.plain.graph.initializers
    return {n: np.asarray(a, np.float32) for n, a in _given(weights).items() if n in own}


def _given(
    weights: HasParameters | Mapping[str, Any] | str | os.PathLike[str],
) -> Mapping[str, Any]:
    if isinstance(weights, str | os.PathLike):
        return load_checkpoint(weights)[0]
    return weights if isinstance(weights, Mapping) else weights.parameters


__all__ = ["Weights", "other_values", "trained_values"]
