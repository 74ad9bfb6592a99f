"""What may look on while a run goes, and end it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.training.results import StepResult
    from onnxtrain.training.run import Run

Record = dict[str, Any]


class Callback:
    """Base of callbacks; each method may set ``run.stop`` to a reason."""

    name = ""
    """Under which :meth:`state_dict` is kept in checkpoints; empty if there is no state."""

    def on_start(self, run: Run) -> None:
        """Look at the run before its first step."""

    def on_step(self, run: Run, result: StepResult) -> None:
        """Look at a batch."""

    def on_epoch(self, run: Run, record: Record) -> None:
        """Look at an epoch: losses and metrics, those of the validation as ``val_...``."""

    def on_end(self, run: Run) -> None:
        """Look at the run after its last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, ready for JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class Best(Callback):
    """Remembers the best epoch by one of its numbers.

    Args:
        monitor: a name in the epoch's record; ``None`` takes ``val_loss``, else ``loss``.
        mode: ``"min"`` or ``"max"``; ``None`` takes max for accuracies.
        min_delta: how much better an epoch must be to count.
    """

    name = "best"

    def __init__(
        self, monitor: str | None = None, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        if mode not in (None, "min", "max"):
            raise OnnxTrainError(f"no such mode: {mode!r}\nhint: min or max")
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.value: float | None = None
        self.epoch = 0
        self.improved = False
        self.since = 0
        """Epochs since the best one."""
        self.by: str | None = None
        """What epochs were compared by."""

    def on_epoch(self, run: Run, record: Record) -> None:
        """Compare with the best epoch so far."""
        monitor = self.monitor or ("val_loss" if "val_loss" in record else "loss")
        if monitor not in record:
            known = [n for n, v in record.items() if isinstance(v, float)]
            raise OnnxTrainError(f"nothing called {monitor!r} to monitor\nhint: {', '.join(known)}")
        if self.by not in (None, monitor):
            self.value, self.since = None, 0  # numbers of another kind cannot be compared
        self.by = monitor
        value = float(record[monitor])
        best = "accuracy" in monitor or "top_" in monitor
        sign = 1.0 if (self.mode or ("max" if best else "min")) == "max" else -1.0
        self.improved = not math.isnan(value) and (
            self.value is None or sign * (value - self.value) > self.min_delta
        )
        self.since = 0 if self.improved else self.since + 1
        if self.improved:
            self.value, self.epoch = value, int(record["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and when it was."""
        return {"by": self.by, "value": self.value, "epoch": self.epoch, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value."""
        self.by = state.get("by")
        self.value, self.epoch, self.since = state["value"], state["epoch"], state["since"]


class EarlyStopping(Best):
    """Ends a run when some epochs in a row have not been better than the best one.

    Args:
        patience: how many epochs.
        monitor: as in :class:`Best`.
        mode: as in :class:`Best`.
        min_delta: as in :class:`Best`.
    """

    name = "early_stopping"

    def __init__(
        self,
        patience: int,
        monitor: str | None = None,
        mode: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if patience < 1:
            raise OnnxTrainError(f"patience must be at least 1: {patience}")
        self.patience = patience

    def on_epoch(self, run: Run, record: Record) -> None:
        """Stop when patience is over."""
        super().on_epoch(run, record)
        if self.since >= self.patience:
            run.stop = f"no better than epoch {self.epoch} for {self.since} epochs"
