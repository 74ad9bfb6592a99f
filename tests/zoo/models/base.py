"""The definition of a zoo model: a seeded torch module, seeded example inputs, their properties."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

ZOO: dict[str, ZooModel] = {}

# Exporters drop a Dropout of ratio 0, so it would go untested; at this ratio nothing is masked.
RARE = 1e-7


@dataclass(frozen=True)
class Draw:
    """One example input; ``kind`` is ``normal``, ``uniform`` or ``integers`` below ``high``."""

    kind: str
    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0
    batched: bool = True

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        shape = (batch, *self.shape) if self.batched else self.shape
        if self.kind == "normal":
            return torch.randn(shape, generator=generator)
        if self.kind == "uniform":
            return self.low + (self.high - self.low) * torch.rand(shape, generator=generator)
        return torch.randint(int(self.low), int(self.high), shape, generator=generator)


def normal(*shape: int, batched: bool = True) -> Draw:
    return Draw("normal", shape, batched=batched)


def uniform(low: float, high: float, *shape: int, batched: bool = True) -> Draw:
    return Draw("uniform", shape, low, high, batched)


def integers(high: int, *shape: int, low: int = 0, batched: bool = True) -> Draw:
    return Draw("integers", shape, low, high, batched)


@dataclass(frozen=True)
class ZooModel:
    """A torch module with example inputs.

    ``static`` says why the batch cannot be symbolic, ``legacy`` why the older exporter is used,
    ``kink`` where rounding decides a branch of the gradient (float64 settles such a model).
    """

    name: str
    factory: Callable[[], nn.Module]
    draws: tuple[Draw, ...]
    batch_norm: bool = False
    dropout: bool = False
    static: str = ""
    legacy: str = ""
    kink: str = ""
    opset: int | None = None
    fast: bool = False
    batches: tuple[int, int] = (4, 3)
    modes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        modes = ("eval", "train") if self.batch_norm or self.dropout else ("eval",)
        object.__setattr__(self, "modes", modes)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @property
    def source(self) -> str:
        """The text that defines the module: its file and this one."""
        files = sys.modules[self.factory.__module__].__file__, __file__
        return "\n".join(Path(str(file)).read_text() for file in files)

    def build(self, mode: str = "eval") -> nn.Module:
        """The module with the same values each time, its dropout too rare to strike."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = self.factory()
            _make_distinct(module)
        for part in module.modules():
            if isinstance(part, nn.Dropout) and part.p:
                part.p = RARE
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = RARE if part.dropout else 0.0
        return module.train(mode == "train")

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Example inputs for ``batch`` samples."""
        generator = torch.Generator().manual_seed(self.seed + batch)
        return tuple(draw.sample(batch, generator) for draw in self.draws)


def _make_distinct(module: nn.Module) -> None:
    """Move parameters off their constant starts and give BatchNorm statistics a history."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() < 2 or parameter.min() == parameter.max():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                part.running_mean.normal_(0.0, 0.2)
                part.running_var.uniform_(0.5, 1.5)


def register(name: str, *draws: Draw, **flags):
    """Put a zero-argument module factory (a class or a function) into ``ZOO``."""

    def add(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        if name in ZOO:
            raise ValueError(f"two zoo models are called {name!r}")
        ZOO[name] = ZooModel(name, factory, draws, **flags)
        return factory

    return add
