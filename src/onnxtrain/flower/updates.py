"""What a round changed, as named tensors.

>>> before, after = {"w": np.float32([3.0])}, {"w": np.float32([1.0])}
>>> pseudo_gradient(before, after)
{'w': array([2.], dtype=float32)}
>>> accumulated([({"w": np.float32([2.0])}, 1), ({"w": np.float32([5.0])}, 3)])
{'w': array([4.25], dtype=float32)}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from onnxtrain.errors import ShapeError


def pseudo_gradient(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return ``before - after`` by name: what server optimizers take for a gradient."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ShapeError(f"tensors that only one side has: {', '.join(map(repr, odd))}")
    return {n: np.asarray(before[n] - after[n]) for n in before}


def accumulated(
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
