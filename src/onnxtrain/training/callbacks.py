"""What may look on while a run goes, and end it.

Runs in Weights & Biases and in MLflow; both packages are optional.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.training.fit import Run
    from onnxtrain.training.results import StepResult

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


class WandbLogger(Callback):
    """Sends losses, metrics and settings to Weights & Biases.

    Args:
        project: as ``wandb.init`` takes it.
        every: steps between two that are sent; epochs are always sent.
        options: all else for ``wandb.init``, such as ``name``, ``mode="offline"``, or ``id`` and
            ``resume="allow"`` for a run that goes on.
    """

    def __init__(self, project: str | None = None, *, every: int = 1, **options: Any) -> None:
        self._wandb = _import_optional("wandb")
        self.project, self.every, self.options = project, _check_interval(every), options
        self.run: Any = None
        """What ``wandb.init`` gave, while a run goes."""

    def on_start(self, run: Run) -> None:
        """Begin a run there."""
        self.run = self._wandb.init(project=self.project, config=_run_config(run), **self.options)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Send a step, if it is its turn."""
        if result.updated and result.step % self.every == 0:
            self.run.log(_numeric_metrics(_step_metrics(run, result), "step/"), step=result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Send an epoch."""
        self.run.log(_numeric_metrics(record, "epoch/"), step=int(record["step"]))

    def on_end(self, run: Run) -> None:
        """End the run there."""
        if run.history.best is not None:
            self.run.summary.update(_numeric_metrics(run.history.best, "best/"))
        self.run.finish()


class MlflowLogger(Callback):
    """Sends losses, metrics and settings to MLflow.

    A training run that ends in an error stays open there; the next one is another run.

    Args:
        experiment: its name; it is made if it is not there.
        uri: of the tracking server or folder; else what MLflow is set to.
        every: steps between two that are sent; epochs are always sent.
        run_name: what MLflow shows.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        uri: str | None = None,
        every: int = 1,
        run_name: str | None = None,
    ) -> None:
        self._client = _import_optional("mlflow").MlflowClient(tracking_uri=uri)
        self.experiment, self.every, self.run_name = experiment, _check_interval(every), run_name
        self.run_id = ""
        """Of the run in MLflow, once it has begun."""

    def on_start(self, run: Run) -> None:
        """Begin a run there."""
        known = self._client.get_experiment_by_name(self.experiment)
        place = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self.run_id = self._client.create_run(place, run_name=self.run_name).info.run_id
        for name, value in _run_config(run).items():
            self._client.log_param(self.run_id, name, value)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Send a step, if it is its turn."""
        if result.updated and result.step % self.every == 0:
            self._send(_numeric_metrics(_step_metrics(run, result), "step/"), result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Send an epoch."""
        self._send(_numeric_metrics(record, "epoch/"), int(record["step"]))

    def on_end(self, run: Run) -> None:
        """End the run there."""
        self._client.set_terminated(self.run_id, "FINISHED")

    def _send(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self.run_id, name, value, step=step)


def _import_optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OnnxTrainError(f"{package} is not installed\nhint: pip install {package}") from error


def _check_interval(every: int) -> int:
    if every < 1:
        raise OnnxTrainError(f"every must be at least 1: {every}")
    return every


def _step_metrics(run: Run, result: StepResult) -> Record:
    return {"loss": result.loss, **result.metrics, "lr": run.trainer.lr}


def _numeric_metrics(record: Record, before: str) -> dict[str, float]:
    return {
        before + name: float(value)
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value)
    }


def _run_config(run: Run) -> dict[str, Any]:
    manifest = run.trainer.manifest
    fit_settings = {n: v for n, v in run.options.settings().items() if v is not None}
    return {
        **fit_settings,
        "lr": run.base_lr,
        "loss": str(manifest.loss.get("name", "")),
        "optimizer": str(manifest.optimizer.get("name", "")),
        "seed": run.trainer.seed,
    }
