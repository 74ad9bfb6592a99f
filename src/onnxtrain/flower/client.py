"""The ClientApp: training and evaluation of artifacts on a client's own data.

A client's part of a round: take the global weights, train on its data, and tell.
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
from onnxtrain.errors import OnnxTrainError
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

_KEPT, _PROGRESS = "onnxtrain.kept", "onnxtrain.progress"
OPTIMIZER_STATES = ("reset", "keep")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a client trains; what is ``None`` is for the server to say."""

    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    shuffle: bool | None = None
    seed: int | None = None
    optimizer_state: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer_state not in (None, *OPTIMIZER_STATES):
            raise OnnxTrainError(
                f"no such optimizer_state: {self.optimizer_state!r}\nhint: reset or keep"
            )

    def completed(self, config: Mapping[str, Any]) -> Settings:
        """Return the settings with what is left open as the server says, else by default."""
        values = {}
        for field in dataclasses.fields(self):
            own = getattr(self, field.name)
            said = config.get(field.name.replace("_", "-"), _DEFAULTS[field.name])
            values[field.name] = said if own is None else own
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

    Nothing of one client reaches another that shares the process: what stays between rounds is in
    the client's own state, which Flower keeps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.manifest = trainer.manifest
        self._start = trainer.state_dict()
        self._lr = trainer.lr

    def train(
        self, arrays: ArrayRecord, data: Any, settings: Settings, number: int, kept: RecordDict
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Return the weights after a round of training, and what it was like.

        Args:
            arrays: the global weights.
            data: as :meth:`Trainer.fit` takes it.
            settings: with nothing left open.
            number: of the round; the order of the data follows from it and the seed.
            kept: the client's own records; the optimizer's state and running statistics that do
                not travel stay in it.
        """
        trainer, keep = self.trainer, settings.optimizer_state == "keep"
        tensors = from_record(arrays, self.manifest)
        self._load(tensors, kept, keep=keep)
        trainer.lr = self._lr if settings.lr is None else settings.lr
        trainer.seed = (int(settings.seed or 0) * 1009 + number) % SEED_LIMIT
        first = trainer.global_step
        history = trainer.fit(
            data,
            int(settings.epochs or 1),
            batch_size=settings.batch_size,
            shuffle=settings.shuffle,
            progress=False,
            tensorboard=False,
        )
        self._store(tensors, kept, keep=keep)
        last = {n: v for n, v in history.epochs[-1].items() if n in self.metric_names}
        metrics = {EXAMPLES: self._examples(data, settings), **last}
        metrics["steps"] = trainer.global_step - first
        new = {n: np.array(trainer.view(n)) for n in tensors}
        return to_record(new), MetricRecord(metrics)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The numbers that a round reports: the loss and the metrics of the artifacts."""
        return ("loss", *self.trainer.metric_names)

    def evaluate(self, arrays: ArrayRecord, data: Any, kept: RecordDict) -> MetricRecord:
        """Return loss and metrics of the global weights on own data."""
        self._load(from_record(arrays, self.manifest), kept, keep=False)
        evaluation = self.trainer.evaluate(data)
        return MetricRecord({EXAMPLES: evaluation.samples, **evaluation.to_dict()})

    def _load(self, tensors: Mapping[str, np.ndarray], kept: RecordDict, *, keep: bool) -> None:
        anchors = {
            state_key(s.parameter, s.slot): tensors[s.parameter]
            for s in self.manifest.state
            if s.slot == ANCHOR
        }
        own = kept.array_records.get(_KEPT)
        names = self._client_state_names(tensors, keep=keep)
        stored = {n: own[n].numpy() for n in names if own is not None and n in own}
        self.trainer.load_state_dict({**self._start, **stored, **tensors, **anchors})
        progress: dict[str, Any] = dict(kept.metric_records.get(_PROGRESS, {}))
        self.trainer.global_step = int(progress.get("step", 0)) if keep else 0

    def _store(self, tensors: Mapping[str, np.ndarray], kept: RecordDict, *, keep: bool) -> None:
        names = self._client_state_names(tensors, keep=keep)
        state = self.trainer.state_dict()
        if names:
            kept[_KEPT] = to_record({n: state[n] for n in names})
        kept[_PROGRESS] = MetricRecord({"step": self.trainer.global_step})

    def _client_state_names(self, tensors: Mapping[str, np.ndarray], *, keep: bool) -> list[str]:
        """Return the names, as in a state_dict, of what stays with the client."""
        statistics = [b.name for b in self.manifest.buffers if b.name not in tensors]
        slots = [s for s in self.manifest.state if s.slot != ANCHOR] if keep else []
        return [*statistics, *(state_key(s.parameter, s.slot) for s in slots)]

    def _examples(self, data: Any, settings: Settings) -> int:
        """Return how many samples an epoch has."""
        size = settings.batch_size or self.trainer.fixed_batch or 32
        source = as_source(data, batch_size=size, columns=self.trainer.inputs)
        samples = getattr(source, "samples", None)
        return int(samples) if samples else sum(b.size for b in source.batches(0))


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

    Options that are left out are taken from the server's configuration (``epochs``,
    ``batch-size``, ``lr``, ``shuffle``, ``seed``, ``optimizer-state``); those given here win.

    Args:
        artifacts: what :func:`onnxtrain.build` gave, or a directory, or a function from Flower's
            ``Context`` to one of these; of the same build as the server's.
        data: what :meth:`Trainer.fit` takes, or a function from Flower's ``Context`` to it.
        validation: data to evaluate on, likewise; else the training data.
        epochs: of a round; 1.
        batch_size: of arrays; 32, or what the model is fixed to.
        lr: learning rate; else that of the build.
        shuffle: arrays, in an order that follows from seed and round; by default they are.
        seed: of that order, and of dropout masks.
        optimizer_state: ``"reset"`` at the start of each round, or ``"keep"`` it with the client.
        device: ``"cpu"`` or ``"cuda"``.
        threads: of onnxruntime's pool.
        mods: Flower's mods, such as those of its privacy wrappers.
    """
    settings = Settings(epochs, batch_size, lr, shuffle, seed, optimizer_state)

    opened: dict[str, LocalRound] = {}

    def local(context: Context) -> LocalRound:
        place = resolve_artifacts(artifacts, context)
        label = "" if isinstance(place, Artifacts) else os.fspath(place)
        if label not in opened:
            opened[label] = LocalRound(Trainer(place, device=device, threads=threads))
        return opened[label]

    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: dict[str, Any] = dict(message.content.config_records.get(CONFIG, {}))
        mine = local(context)
        _check_client_proximal(config, mine.manifest.optimizer)
        arrays, metrics = mine.train(
            message.content.array_records[ARRAYS],
            _client_data(data, context),
            settings.completed(config),
            int(config.get("server-round", 0)),
            context.state,
        )
        return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        chosen = data if validation is None else validation
        arrays = message.content.array_records[ARRAYS]
        metrics = local(context).evaluate(arrays, _client_data(chosen, context), context.state)
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def _client_data(data: Any, context: Context) -> Any:
    """Return the data of this client."""
    return data(context) if inspect.isfunction(data) or inspect.ismethod(data) else data


def _check_client_proximal(config: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    wanted, built = float(config.get("proximal-mu", 0.0)), float(optimizer.get("proximal", 0.0))
    if "proximal-mu" in config and wanted != built:
        raise OnnxTrainError(
            f"the server asks for a proximal term of {wanted:g}, these artifacts have {built:g}\n"
            f"hint: build(..., optimizer='sgd:proximal={wanted:g}')"
        )
