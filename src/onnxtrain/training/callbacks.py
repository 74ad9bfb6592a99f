"""Callbacks of a training run: early stopping, Weights & Biases, MLflow.

A callback observes a :class:`~onnxtrain.training.fit.Run` and can stop it. ``wandb`` and ``mlflow``
are optional packages.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError, argument, by_caller, expected_one_of
from onnxtrain.training.metrics import BUILT_IN, OBJECTS

if TYPE_CHECKING:
    from onnxtrain.training.fit import Run
    from onnxtrain.training.results import StepResult

Record = dict[str, Any]


class Callback:
    """Base class of callbacks; any method can stop the run by setting ``run.stop`` to a reason."""

    name = ""
    """Key of :meth:`state_dict` in checkpoints; empty if there is no state."""

    def on_start(self, run: Run) -> None:
        """Called before the first step."""

    def on_step(self, run: Run, result: StepResult) -> None:
        """Called after each batch."""

    def on_epoch(self, run: Run, record: Record) -> None:
        """Called after each epoch with its loss and metrics; validation has ``val_...``."""

    def on_end(self, run: Run) -> None:
        """Called after the last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""


class Best(Callback):
    """Remembers the best epoch.

    Args:
        monitor: value of the epoch's record to compare; ``val_loss``, else ``loss``, by default.
            ``"max:val_iou"`` also gives the mode.
        mode: ``"min"`` or ``"max"``; known from the name for losses, errors, accuracies, scores and
            the built-in metrics.
        min_delta: minimum change that counts as an improvement.
    """

    name = "best"

    def __init__(
        self, monitor: str | None = None, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        if mode not in (None, "min", "max"):
            raise OnnxTrainError(f"unknown mode: {mode!r} (expected one of 'min', 'max')")
        prefix, colon, name = (monitor or "").partition(":")
        if colon and prefix in ("min", "max"):
            monitor, mode = name, prefix
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.value: float | None = None
        self.epoch = 0
        self.improved = False
        self.since = 0
        """Epochs since the best one."""
        self.by: str | None = None
        """The value by which epochs were compared."""

    def on_epoch(self, run: Run, record: Record) -> None:
        """Compare with the best epoch so far."""
        monitor = self.monitor or ("val_loss" if "val_loss" in record else "loss")
        if monitor not in record:
            known = [n for n, v in record.items() if isinstance(v, float)]
            raise unknown_monitor(monitor, known, validated=run.validation is not None)
        if self.by not in (None, monitor):
            self.value, self.since = None, 0  # different values cannot be compared
        self.by = monitor
        value = _number(monitor, record[monitor])
        sign = 1.0 if self.maximizes(monitor) else -1.0
        self.improved = not math.isnan(value) and (
            self.value is None or sign * (value - self.value) > self.min_delta
        )
        self.since = 0 if self.improved else self.since + 1
        if self.improved:
            self.value, self.epoch = value, int(record["epoch"])

    def maximizes(self, name: str) -> bool:
        """Return whether a larger value is better.

        Raises:
            OnnxTrainError: if ``mode`` is missing and cannot be derived from the name.
        """
        if self.mode is not None:
            return self.mode == "max"
        words = {*name.split("_")}
        if not words & _SMALLER_IS_BETTER and not words & _LARGER_IS_BETTER:
            larger, smaller = (argument("monitor", f"{mode}:{name}") for mode in ("max", "min"))
            raise OnnxTrainError(
                f"is a larger or a smaller {name!r} better?\nhint: {larger} or {smaller}"
            )
        return not words & _SMALLER_IS_BETTER

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its epoch."""
        return {"by": self.by, "value": self.value, "epoch": self.epoch, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value."""
        self.by = state.get("by")
        self.value, self.epoch, self.since = state["value"], state["epoch"], state["since"]


_LARGER_IS_BETTER = {
    *("accuracy", "auc", "bleu", "dice", "f1", "iou", "map", "miou", "precision", "r2"),
    *("recall", "score"),
    "top",
}
_SMALLER_IS_BETTER = {
    *("cer", "error", "loss", "lr", "mae", "mape", "mse", "norm", "perplexity", "rmse", "wer"),
}
"""Words in names of values; an unknown name needs a mode."""


def unknown_monitor(name: str, known: Sequence[str], *, validated: bool) -> OnnxTrainError:
    """Return the error for a value that records of epochs do not have, and what would add it."""
    metrics = [n for n in known if not n.startswith("val_")]
    possible = [*known, *(f"val_{n}" for n in (*metrics, *BUILT_IN, *OBJECTS))]
    near = [n for n in possible if n.startswith(name)]  # val_acc is val_accuracy, not val_auc
    near = near[:1] or difflib.get_close_matches(name, possible, n=1)
    message = f"unknown monitor: {name!r} {expected_one_of(name, known)}"
    if not near:
        return OnnxTrainError(message)
    python, flags, (wanted,) = [], [], near
    plain = wanted.removeprefix("val_")
    if plain != wanted and not validated:
        python.append("validation=data")
        flags.append("--validation FILE")
    if wanted not in known and plain not in known:
        python.append(f"metrics=[{plain!r}]")
        flags.append(f"--metric {plain}")
    python.append(f"monitor={wanted!r}")
    flags.append(f"--monitor {wanted}")
    hint = by_caller(f"fit(..., {', '.join(python)})", " ".join(flags))
    return OnnxTrainError(f"{message}\nhint: {hint}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, list):
        raise OnnxTrainError(f"{name!r} is an array\nhint: monitor a number, such as 'val_loss'")
    return float(value)


class EarlyStopping(Best):
    """Stops a run after some epochs in a row without an improvement.

    Args:
        patience: number of epochs without an improvement.
        monitor: as in :class:`Best`; also that of the run, unless ``fit`` gets one. Without it,
            that of ``fit``.
        mode: as in :class:`Best`.
        min_delta: as in :class:`Best`.
        restore_best: continue with weights, optimizer state and step counter of the best epoch
            after the run: from its checkpoint, or from a copy in memory without ``directory``.
    """

    name = "early_stopping"

    def __init__(
        self,
        patience: int,
        monitor: str | None = None,
        mode: str | None = None,
        min_delta: float = 0.0,
        *,
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if patience < 1:
            raise OnnxTrainError(f"patience must be at least 1, got {patience}")
        self.patience, self.restore_best = patience, restore_best
        self._copy: tuple[dict[str, Any], int] | None = None

    def on_start(self, run: Run) -> None:
        """Follow the monitor of ``fit``; check that the run keeps the epoch to restore."""
        self._copy = None
        if self.monitor is None:
            self.monitor, self.mode = run.best.monitor, self.mode or run.best.mode
        if self.restore_best and run.workers is not None:
            raise OnnxTrainError(
                "restore_best=True is not supported in several workers\n"
                "hint: trainer.load('.../checkpoints/best.safetensors') after the run"
            )
        if self.restore_best and run.best.monitor != self.monitor:
            raise OnnxTrainError(
                f"restore_best=True: the best epoch of this run is by {run.best.monitor!r}, "
                f"EarlyStopping monitors {self.monitor!r}\n"
                "hint: pass monitor= to EarlyStopping only"
            )

    def on_epoch(self, run: Run, record: Record) -> None:
        """Stop the run when patience is exhausted."""
        super().on_epoch(run, record)
        if self.restore_best and run.best.improved and run.rotation is None:
            self._copy = run.trainer.state_dict(), run.trainer.global_step
        if self.since >= self.patience:
            run.stop = f"no improvement over epoch {self.epoch} for {self.since} epochs"

    def on_end(self, run: Run) -> None:
        """Restore the best epoch, unless the run was interrupted, which may be resumed."""
        if not self.restore_best or run.interrupted or run.history.best is None:
            return
        if run.rotation is not None:
            run.trainer.load(run.rotation.best)
        elif self._copy is not None:
            state, step = self._copy
            run.trainer.load_state_dict(state)
            run.trainer.global_step = step
        run.show.line(f"restored epoch {run.best.epoch}, the best by {run.best.by}")


class WandbLogger(Callback):
    """Logs losses, metrics and options to Weights & Biases.

    Args:
        project: ``project`` of ``wandb.init``.
        every: logging interval in steps; epochs are always logged.
        options: other arguments of ``wandb.init``, such as ``name``, ``mode="offline"``, or ``id``
            and ``resume="allow"`` for a resumed run.
    """

    def __init__(self, project: str | None = None, *, every: int = 1, **options: Any) -> None:
        self._wandb = _import_optional("wandb")
        self.project, self.every, self.options = project, _check_interval(every), options
        self.run: Any = None
        """The result of ``wandb.init`` during a run."""

    def on_start(self, run: Run) -> None:
        """Start a run."""
        self.run = self._wandb.init(project=self.project, config=_run_config(run), **self.options)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Log a step, every ``every`` steps."""
        if result.updated and result.step % self.every == 0:
            self.run.log(_numeric_metrics(_step_metrics(run, result), "step/"), step=result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Log an epoch."""
        self.run.log(_numeric_metrics(record, "epoch/"), step=int(record["step"]))

    def on_end(self, run: Run) -> None:
        """Finish the run."""
        if run.history.best is not None:
            self.run.summary.update(_numeric_metrics(run.history.best, "best/"))
        self.run.finish()


class MlflowLogger(Callback):
    """Logs losses, metrics and options to MLflow.

    A training run that ends in an error stays open in MLflow; the next one is a new run.

    Args:
        experiment: name of the experiment; created if it does not exist.
        uri: tracking server or folder; MLflow's setting by default.
        every: logging interval in steps; epochs are always logged.
        run_name: display name of the run.
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
        """Id of the run in MLflow, once it has started."""

    def on_start(self, run: Run) -> None:
        """Start a run."""
        known = self._client.get_experiment_by_name(self.experiment)
        experiment_id = (
            known.experiment_id if known else self._client.create_experiment(self.experiment)
        )
        self.run_id = self._client.create_run(experiment_id, run_name=self.run_name).info.run_id
        for name, value in _run_config(run).items():
            self._client.log_param(self.run_id, name, value)

    def on_step(self, run: Run, result: StepResult) -> None:
        """Log a step, every ``every`` steps."""
        if result.updated and result.step % self.every == 0:
            self._log(_numeric_metrics(_step_metrics(run, result), "step/"), result.step)

    def on_epoch(self, run: Run, record: Record) -> None:
        """Log an epoch."""
        self._log(_numeric_metrics(record, "epoch/"), int(record["step"]))

    def on_end(self, run: Run) -> None:
        """Finish the run."""
        self._client.set_terminated(self.run_id, "FINISHED")

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self.run_id, name, value, step=step)


def _import_optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OnnxTrainError(f"{package} is not installed\nhint: pip install {package}") from error


def _check_interval(every: int) -> int:
    if every < 1:
        raise OnnxTrainError(f"every must be at least 1, got {every}")
    return every


def _step_metrics(run: Run, result: StepResult) -> Record:
    return {"loss": result.loss, **result.metrics, "lr": run.trainer.lr}


def _numeric_metrics(record: Record, prefix: str) -> dict[str, float]:
    return {
        prefix + name: float(value)
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
