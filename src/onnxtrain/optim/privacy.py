"""Differentially private gradients: how far each example may pull, and how much noise is added."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

from onnxtrain.errors import MissingExtraError, PrepareError


@dataclasses.dataclass(frozen=True)
class DP:
    """Gradients of single examples, clipped, summed, with noise: DP-SGD.

    Args:
        clip: the largest joint norm of an example's gradients.
        noise: standard deviation of the noise in the sum, as a multiple of ``clip``.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise PrepareError(f"clip must be positive: {self.clip}")
        if not 0 <= self.noise < math.inf:
            raise PrepareError(f"noise must not be negative: {self.noise}")

    def epsilon(self, *, examples: int, batch_size: int, steps: int, delta: float) -> float:
        """Return the epsilon that ``steps`` cost, by Google's dp-accounting.

        It holds for batches that each example joins with probability ``batch_size / examples``, on
        its own; fixed batches of shuffled data are taken for that, as is usual.

        Raises:
            MissingExtraError: dp-accounting is not installed.
        """
        if not self.noise:
            return math.inf
        try:
            events: Any = importlib.import_module("dp_accounting")
            rdp: Any = importlib.import_module("dp_accounting.rdp")
        except ImportError as error:
            raise MissingExtraError(
                f"dp-accounting is not installed: {error}\nhint: pip install 'onnxtrain[privacy]'"
            ) from error
        rate = min(1.0, batch_size / examples)
        step = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(self.noise))
        accountant = rdp.RdpAccountant()
        accountant.compose(events.SelfComposedDpEvent(step, steps))
        return float(accountant.get_epsilon(delta))
