"""Random arrays for the cases, from one seeded generator."""

from __future__ import annotations

import numpy as np

from .single import Const

_rng = np.random.default_rng(0)


def f(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(_rng.standard_normal(shape) * scale, np.float32)


def pos(*shape: int) -> np.ndarray:
    return np.asarray(_rng.random(shape) + 0.5, np.float32)


def ints(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return np.asarray(_rng.integers(low, high, shape), np.int64)


def flags(*shape: int) -> np.ndarray:
    return _rng.random(shape) < 0.5


def c(value, dtype=np.int64) -> Const:
    return Const(np.asarray(value, dtype))


def w(*shape: int) -> Const:
    return Const(f(*shape))
