"""``onnxruntime.training.amp``: loss scalers."""

from __future__ import annotations

from typing import Any


class LossScaler:
    """Base class of loss scalers."""

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self._loss_scale = float(loss_scale)
        self._initial_loss_scale = float(loss_scale)

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        self._loss_scale = float(loss_scale)

    @property
    def input_name(self) -> str | None:
        """The name of the model input for the scale."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        self._input_name = input_name

    def reset(self) -> None:
        """Restore the initial scale."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: Any) -> None:
        """Update the scale after a step."""
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """Double the scale after ``up_scale_window`` finite steps; halve it on overflow."""

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Restore the initial scale and reset the step count."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: Any) -> None:
        """Update the scale: grow it after finite gradients, shrink it after an overflow."""
        if not self.automatic_update:
            return
        if train_step_info.all_finite:
            self._stable_steps_count += 1
            if self._stable_steps_count >= self.up_scale_window:
                self._loss_scale = min(self.max_loss_scale, self._loss_scale * 2)
                self._stable_steps_count = 0
        else:
            self._loss_scale = max(self.min_loss_scale, self._loss_scale / 2)
            self._stable_steps_count = 0


__all__ = ["DynamicLossScaler", "LossScaler"]
