"""The ClientApp: train and evaluate artifacts on the client's own data.

``LocalRound`` runs one round: load the global weights, train, return the new weights and metrics.
``client_app`` wraps it in a Flower ``ClientApp``.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.checkpoint import state_key
from onnxtrain.errors import OnnxTrainError, expected_one_of
from onnxtrain.flower.messages import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    METRICS,
    ArrayRecord,
    ArtifactsSource,
    ClientApp,
    Context,
    Message,
    MetricRecord,
    RecordDict,
    from_record,
    resolve_artifacts,
    to_record,
)
from onnxtrain.optim.transforms import ANCHOR
from onnxtrain.training import Trainer
from onnxtrain.training.checks import SEED_LIMIT
from onnxtrain.training.data import as_source

# Keys of the records that Flower stores for each client between rounds.
_KEPT, _PROGRESS = "onnxtrain.kept", "onnxtrain.progress"
OPTIMIZER_STATES = ("reset", "keep")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Training options of a client; ``None`` takes the server's value, then the default."""

    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    shuffle: bool | None = None
    seed: int | None = None
    optimizer_state: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer_state not in (None, *OPTIMIZER_STATES):
            expected = expected_one_of(str(self.optimizer_state), OPTIMIZER_STATES)
            raise OnnxTrainError(f"unknown optimizer_state: {self.optimizer_state!r} {expected}")

    def completed(self, config: Mapping[str, Any]) -> Settings:
        """Return the settings with each ``None`` replaced by the server's value or the default."""
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fallback = config.get(field.name.replace("_", "-"), _DEFAULTS[field.name])
            values[field.name] = fallback if value is None else value
        return Settings(**values)


_DEFAULTS: dict[str, Any] = {
    "epochs": 1,
    "batch_size": None,
    "lr": None,
    "shuffle": True,
    "seed": 0,
    "optimizer_state": "reset",
}


class LocalRound:
    """A trainer that starts every round from the server's weights.

    Clients of a simulation share a process and this trainer. Everything a client keeps between
    rounds is therefore in its own Flower state, and the trainer is reset for each round.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.manifest = trainer.manifest
        self._start = trainer.state_dict()
        self._lr = trainer.lr

    def train(
        self,
        arrays: ArrayRecord,
        data: Any,
        settings: Settings,
        number: int,
        client_state: RecordDict,
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Return the weights and metrics after one round of training.

        Args:
            arrays: the global weights.
            data: the training data, as for :meth:`Trainer.fit`.
            settings: the completed settings.
            number: the round; with the seed it determines the order of the data.
            client_state: the client's own records, updated in place: optimizer state, and running
                statistics that are not sent.
        """
        trainer, keep = self.trainer, settings.optimizer_state == "keep"
        tensors = from_record(arrays, self.manifest)
        self._load(tensors, client_state, keep=keep)
        trainer.lr = self._lr if settings.lr is None else settings.lr
        trainer.seed = (int(settings.seed or 0) * 1009 + number) % SEED_LIMIT
        first = trainer.global_step
        history = trainer.fit(
            data,
            epochs=int(settings.epochs or 1),
            batch_size=settings.batch_size,
            shuffle=settings.shuffle,
            progress=False,
            tensorboard=False,
        )
        self._store(tensors, client_state, keep=keep)
        last = {n: v for n, v in history.epochs[-1].items() if n in self.metric_names}
        metrics = {EXAMPLES: self._examples(data, settings), **last}
        metrics["steps"] = trainer.global_step - first
        new = {n: np.array(trainer.view(n)) for n in tensors}
        return to_record(new), MetricRecord(metrics)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The values that a round reports: the loss and the metrics of the artifacts."""
        return ("loss", *self.trainer.metric_names)

    def evaluate(self, arrays: ArrayRecord, data: Any, client_state: RecordDict) -> MetricRecord:
        """Return loss and metrics of the global weights on the client's data."""
        self._load(from_record(arrays, self.manifest), client_state, keep=False)
        evaluation = self.trainer.evaluate(data)
        return MetricRecord({EXAMPLES: evaluation.samples, **evaluation.to_dict()})

    def _load(
        self, tensors: Mapping[str, np.ndarray], client_state: RecordDict, *, keep: bool
    ) -> None:
        anchors = {
            state_key(s.parameter, s.slot): tensors[s.parameter]
            for s in self.manifest.state
            if s.slot == ANCHOR
        }
        records = client_state.array_records.get(_KEPT)
        names = self._client_state_names(tensors, keep=keep)
        stored = {n: records[n].numpy() for n in names if records is not None and n in records}
        self.trainer.load_state_dict({**self._start, **stored, **tensors, **anchors})
        progress: dict[str, Any] = dict(client_state.metric_records.get(_PROGRESS, {}))
        self.trainer.global_step = int(progress.get("step", 0)) if keep else 0

    def _store(
        self, tensors: Mapping[str, np.ndarray], client_state: RecordDict, *, keep: bool
    ) -> None:
        names = self._client_state_names(tensors, keep=keep)
        state = self.trainer.state_dict()
        if names:
            client_state[_KEPT] = to_record({n: state[n] for n in names})
        client_state[_PROGRESS] = MetricRecord({"step": self.trainer.global_step})

    def _client_state_names(self, tensors: Mapping[str, np.ndarray], *, keep: bool) -> list[str]:
        """Return the names, as in a state_dict, of the tensors that stay with the client."""
        statistics = [b.name for b in self.manifest.buffers if b.name not in tensors]
        slots = [s for s in self.manifest.state if s.slot != ANCHOR] if keep else []
        return [*statistics, *(state_key(s.parameter, s.slot) for s in slots)]

    def _examples(self, data: Any, settings: Settings) -> int:
        """Return the number of samples per epoch."""
        size = settings.batch_size or self.trainer.fixed_batch or 32
        source = as_source(data, self.trainer.batch_specs, batch_size=size)
        samples = getattr(source, "samples", None)
        return int(samples or sum(b.size for b in source.batches(0)))


def client_app(
    artifacts: ArtifactsSource,
    data: Any,
    *,
    validation: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    optimizer_state: str | None = None,
    device: str = "cpu",
    threads: int | None = 1,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return a ClientApp that trains and evaluates artifacts.

    Options given here win over the server's configuration (``epochs``, ``batch-size``, ``lr``,
    ``shuffle``, ``seed``, ``optimizer-state``), which wins over the defaults.

    Args:
        artifacts: the result of :func:`onnxtrain.build`, its directory, or a function of Flower's
            ``Context`` that returns one of these. Server and clients need the same build.
        data: training data as for :meth:`Trainer.fit`, or a function of Flower's ``Context`` that
            returns it.
        validation: evaluation data, likewise; by default the training data.
        epochs: epochs per round; 1 by default.
        batch_size: batch size for arrays; by default the model's fixed batch size, or 32.
        lr: learning rate; by default that of the build.
        shuffle: shuffle arrays, in an order that depends on seed and round; on by default.
        seed: random seed for shuffling and dropout; 0 by default.
        optimizer_state: ``"reset"`` it every round (the default), or ``"keep"`` it on the client.
        device: as in :class:`~onnxtrain.Trainer`.
        threads: threads of onnxruntime.
        mods: Flower mods, such as those of its privacy wrappers.
    """
    settings = Settings(epochs, batch_size, lr, shuffle, seed, optimizer_state)
    rounds: dict[str, LocalRound] = {}

    def local(context: Context) -> LocalRound:
        source = resolve_artifacts(artifacts, context)
        path = "" if isinstance(source, Artifacts) else os.fspath(source)
        if path not in rounds:
            rounds[path] = LocalRound(Trainer(source, device=device, threads=threads))
        return rounds[path]

    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: dict[str, Any] = dict(message.content.config_records.get(CONFIG, {}))
        local_round = local(context)
        _check_client_proximal(config, local_round.manifest.optimizer)
        arrays, metrics = local_round.train(
            message.content.array_records[ARRAYS],
            _client_data(data, context),
            settings.completed(config),
            int(config.get("server-round", 0)),
            context.state,
        )
        return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        samples = data if validation is None else validation
        arrays = message.content.array_records[ARRAYS]
        metrics = local(context).evaluate(arrays, _client_data(samples, context), context.state)
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def _client_data(data: Any, context: Context) -> Any:
    """Return the data of this client."""
    return data(context) if inspect.isfunction(data) or inspect.ismethod(data) else data


def _check_client_proximal(config: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    requested = float(config.get("proximal-mu", 0.0))
    built = float(optimizer.get("proximal", 0.0))
    if "proximal-mu" in config and requested != built:
        raise OnnxTrainError(
            f"the server requests proximal-mu={requested:g}, the artifacts have {built:g}\n"
            f"hint: build(..., optimizer='sgd:proximal={requested:g}')"
        )
