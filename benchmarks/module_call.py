"""Time a step of TrainableModule against torch: python -m benchmarks.module_call [NET ...].

Forward pass, loss and backward pass, one thread, torch and ours in turn: medians over rounds, and
the median of their ratios. ``tiny`` has 16, 32 and 4 units at a batch of 8, where only the call
itself takes time; all others are the nets of ``benchmarks.workloads``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import WORKLOADS
from onnxtrain.torch import TrainableModule

NETS = ["tiny", "mlp", "cnn", "resnet18", "vit", "lm2k"]
ROUNDS = 15
SECONDS = 0.2
"""That a round of one of the two takes at least."""


def tiny() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a net that is all call, and its loss."""
    net, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16)
    return net, lambda module: module(x).square().mean()


def workload(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a net of the benchmarks, and its loss on a batch."""
    chosen = WORKLOADS[name]
    x, labels = (torch.from_numpy(a) for a in chosen.batch())
    return chosen.module(), lambda module: F.cross_entropy(module(x), labels)


def spent(module: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int) -> float:
    """Return the seconds of a step."""
    start = time.perf_counter()
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        loss(module).backward()
    return (time.perf_counter() - start) / steps


def measure(name: str, rounds: int) -> str:
    """Return a line with both times and their ratio."""
    theirs, loss = tiny() if name == "tiny" else workload(name)
    theirs.train()
    ours = TrainableModule(copy.deepcopy(theirs), threads=1)
    spent(theirs, loss, 1)
    spent(ours, loss, 1)
    steps = max(1, round(SECONDS / spent(theirs, loss, 2)))
    pairs = [(spent(theirs, loss, steps), spent(ours, loss, steps)) for _ in range(rounds)]
    a, b = (1e3 * statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    return f"{name:10} torch {a:9.3f} ms   ours {b:9.3f} ms   ratio {ratio:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(NETS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in options.nets or NETS:
        print(measure(name, options.rounds), flush=True)


if __name__ == "__main__":
    main()
