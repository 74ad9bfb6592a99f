"""A learning rate that rises to its value and falls to nothing, both in a line."""

from __future__ import annotations

from onnxtrain.compat.ort.api.optimizer import Optimizer
from onnxtrain.optim import Constant, Linear, Warmup


class LinearLRScheduler:
    """The learning rate ``initial_lr`` after ``warmup_step_count`` steps, 0 after all of them.

    The step is the optimizer's own count, so a resumed run goes on where it was.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        falling = total_step_count - warmup_step_count
        after = Linear(falling) if falling > 0 else Constant(factor=0.0)
        self._schedule = Warmup(warmup_step_count, after)
        self._initial_lr = initial_lr
        self._optimizer = optimizer
        self.step()

    def step(self) -> None:
        """Set the learning rate of the optimizer's next step."""
        done = self._optimizer._store.step
        self._optimizer.set_learning_rate(self._schedule.at(self._initial_lr, done))
