"""Runs in Weights & Biases and in MLflow; both packages are optional."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError
from onnxtrain.training.callbacks import Callback, Record

if TYPE_CHECKING:
    from onnxtrain.training.results import StepResult
    from onnxtrain.training.run import Run


class WandbLogger(Callback):
    """Sends losses, metrics and settings to Weights & Biases.

    Args:
        project: as ``wandb.init`` takes it.
        every: steps between two that are sent; epochs are always sent.
        options: all else for ``wandb.init``, such as ``name``, ``mode="offline"``, or ``id`` and
            ``resume="allow"`` for a run that goes on.
    """

    def __init__(self, project: str | None = None, *, every: int = 1, **options: Any) -> None:
        self._wandb = _optional("wandb")
        self.project, self.every, self.options = project, _at_least_one(every), options
        self.run: Any = None
        """What ``wandb.init`` gave, while a run goes."""

    def on_start(self, run: Run) -> None:
        """Begin a run there."""
        self.run = self._wandb.init(project=self.project, config=_settings(run), **self.options)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Send a step, if it is its turn."""
        if result.updated and result.step % self.every == 0:
            self.run.log(_numbers(_of_step(run, result), "step/"), step=result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Send an epoch."""
        self.run.log(_numbers(record, "epoch/"), step=int(record["step"]))

    def on_end(self, run: Run) -> None:
        """End the run there."""
        if run.history.best is not None:
            self.run.summary.update(_numbers(run.history.best, "best/"))
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
        self._client = _optional("mlflow").MlflowClient(tracking_uri=uri)
        self.experiment, self.every, self.run_name = experiment, _at_least_one(every), run_name
        self.run_id = ""
        """Of the run in MLflow, once it has begun."""

    def on_start(self, run: Run) -> None:
        """Begin a run there."""
        known = self._client.get_experiment_by_name(self.experiment)
        place = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self.run_id = self._client.create_run(place, run_name=self.run_name).info.run_id
        for name, value in _settings(run).items():
            self._client.log_param(self.run_id, name, value)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Send a step, if it is its turn."""
        if result.updated and result.step % self.every == 0:
            self._send(_numbers(_of_step(run, result), "step/"), result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Send an epoch."""
        self._send(_numbers(record, "epoch/"), int(record["step"]))

    def on_end(self, run: Run) -> None:
        """End the run there."""
        self._client.set_terminated(self.run_id, "FINISHED")

    def _send(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self.run_id, name, value, step=step)


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OnnxTrainError(f"{package} is not installed\nhint: pip install {package}") from error


def _at_least_one(every: int) -> int:
    if every < 1:
        raise OnnxTrainError(f"every must be at least 1: {every}")
    return every


def _of_step(run: Run, result: StepResult) -> Record:
    return {"loss": result.loss, **result.metrics, "lr": run.trainer.lr}


def _numbers(record: Record, before: str) -> dict[str, float]:
    return {
        before + name: float(value)
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value)
    }


def _settings(run: Run) -> dict[str, Any]:
    manifest = run.trainer.manifest
    asked = {n: v for n, v in run.options.settings().items() if v is not None}
    return {
        **asked,
        "lr": run.base_lr,
        "loss": str(manifest.loss.get("name", "")),
        "optimizer": str(manifest.optimizer.get("name", "")),
        "seed": run.trainer.seed,
    }


__all__ = ["MlflowLogger", "WandbLogger"]
