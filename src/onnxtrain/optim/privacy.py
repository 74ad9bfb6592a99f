"""Options of differentially private training (DP-SGD), and the privacy it costs."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

from onnxtrain.errors import MissingExtraError, PrepareError


@dataclasses.dataclass(frozen=True)
class DP:
    """DP-SGD: clip the gradients of each example, sum them, and add Gaussian noise.

    Args:
        clip: maximum global norm of the gradients of one example.
        noise: noise multiplier: standard deviation of the noise in the sum, divided by ``clip``.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise PrepareError(f"clip must be positive: {self.clip}")
        if not 0 <= self.noise < math.inf:
            raise PrepareError(f"noise must not be negative: {self.noise}")

    def epsilon(self, *, examples: int, batch_size: int, steps: int, delta: float) -> float:
        """Return epsilon after ``steps``, computed by Google's dp-accounting.

        The accountant assumes Poisson sampling: each example joins a batch independently with
        probability ``batch_size / examples``. Batches of shuffled data are treated as such, which
        is common practice.

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
