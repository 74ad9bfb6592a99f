"""Nets whose batch, depth or width grows: ``batch-64``, ``depth-8``, ``parameters-1000000``."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.workloads import Workload

BATCHES = (1, 4, 16, 64, 256, 512)
DEPTHS = (2, 4, 8, 16, 24)
PARAMETERS = (10**4, 10**5, 10**6, 10**7, 10**8)
_VOCABULARY, _SEQUENCE, _BATCH = 1000, 64, 4


def curves() -> list[list[str]]:
    """Return the points of each curve."""
    return [
        [f"batch-{n}" for n in BATCHES],
        [f"depth-{n}" for n in DEPTHS],
        [f"parameters-{n}" for n in PARAMETERS],
    ]


def names() -> list[str]:
    """Return the points of all curves."""
    return [name for curve in curves() for name in curve]


def point(name: str) -> Workload:
    """Return the net of one point of a curve."""
    axis, _, size = name.partition("-")
    n = int(size)
    if axis == "batch":
        return Workload(name, f"CNN 28x28, batch {n}", _cnn, (n, 1, 28, 28), 10, n)
    if axis == "depth":
        shape = (_BATCH, _SEQUENCE)
        title = f"{n} layers of width 128"
        rows = _BATCH * _SEQUENCE
        return Workload(name, title, lambda: _decoder(n), shape, _VOCABULARY, rows, words=True)
    if axis == "parameters":
        return Workload(name, f"MLP, {n:,} parameters", lambda: _dense(n), (64, 784), 10, 64)
    raise KeyError(name)


def _cnn() -> Any:
    from benchmarks.workloads import vision

    return vision.cnn()


def _decoder(layers: int) -> Any:
    from benchmarks.workloads import text

    return text.GPT2(_VOCABULARY, width=128, layers=layers, heads=4, context=_SEQUENCE)


def _dense(parameters: int) -> Any:
    import torch
    from torch import nn

    # Two hidden layers of width w hold about w * w + (784 + 10) * w numbers.
    w = max(1, round((math.sqrt(794**2 + 4 * parameters) - 794) / 2))
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 10))
