"""The table of a model's adapters: one row per pair of matrices."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One pair of matrices beside a frozen layer."""

    module: str
    """The path of the torch module, as PEFT files name it."""
    kind: str
    """``linear``, ``embedding`` or ``conv``."""
    nodes: tuple[str, ...]
    """Names of the nodes that the branch stands beside."""
    a: str
    """The initializer of the first factor: [inputs, rank]; of a convolution, its kernel."""
    b: str
    """The initializer of the second factor: [rank, outputs]; of a convolution, its kernel."""
    magnitude: str | None
    """The initializer of the magnitudes, with DoRA."""
    inputs: int
    outputs: int
    rank: int
    alpha: float
    scaling: float
    """What the product of both factors is multiplied by."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all initializers that train."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def __str__(self) -> str:
        sizes = f"{self.kind} {self.inputs} -> {self.outputs}"
        return f"{self.module}: {sizes}, rank {self.rank}, scaling {self.scaling:g}"


__all__ = ["Adapter"]
