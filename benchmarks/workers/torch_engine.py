"""torch, eager or compiled: fused optimizer, denormals flushed."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workers.serve import Engine, serve
from benchmarks.workloads import find


class Torch(Engine):
    """The module as it is, or under ``torch.compile``."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        # torch imports parts of itself at the first step: they count as import, not as training.
        tiny = torch.nn.Linear(2, 2)
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(tiny.parameters(), fused=True)
            tiny(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        if compiled:
            importlib.import_module("torch._inductor.compile_fx")

    def load(self, folder: Path, made: Path, optimizer: str, threads: int, **facts: Any) -> None:
        """Make the module and its optimizer."""
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        self.module = find(facts["workload"]).module().train()
        with np.load(folder / "state.npz") as state:
            self.module.load_state_dict({n: torch.from_numpy(state[n]) for n in state.files})
        with np.load(folder / "batch.npz") as data:
            self.x, self.labels = torch.from_numpy(data["x"]), torch.from_numpy(data["labels"])
        kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = kind(self.module.parameters(), lr=1e-3, fused=True)
        self.loss = torch.compile(self._loss) if self.compiled else self._loss

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.module(x), labels)

    def step(self, lr: float) -> float:
        """Train one step."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.x, self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def versions(self) -> dict[str, str]:
        """Return the versions that matter."""
        return {"torch": torch.__version__, "numpy": np.__version__}


if __name__ == "__main__":
    compiled = "--compile" in sys.argv
    if compiled and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        sys.exit("TORCHINDUCTOR_CACHE_DIR says where compiled code goes")
    serve(Torch(compiled))
