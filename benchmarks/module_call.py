"""What a call of TrainableModule costs on a tiny net: python -m benchmarks.module_call.

Forward and backward of 16, 32 and 4 units at a batch of 8, one thread, torch and ours in turn; the
medians of rounds of 300 steps, in microseconds, and their ratio.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch import nn

from onnxtrain.torch import TrainableModule

ROUNDS, STEPS = 15, 300


def spent(module: nn.Module, x: torch.Tensor) -> float:
    """Return the microseconds of a step."""
    start = time.perf_counter()
    for _ in range(STEPS):
        module(x).square().mean().backward()
    return 1e6 * (time.perf_counter() - start) / STEPS


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    theirs = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    ours = TrainableModule(copy.deepcopy(theirs), threads=1)
    x = torch.randn(8, 16)
    spent(ours, x)
    rounds = [(spent(theirs, x), spent(ours, x)) for _ in range(ROUNDS)]
    a, b = (statistics.median(r[i] for r in rounds) for i in (0, 1))
    ratio = statistics.median(r[1] / r[0] for r in rounds)
    print(f"torch {a:.0f} us, ours {b:.0f} us, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
