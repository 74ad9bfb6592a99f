"""The ClientApp: training and evaluation of artifacts on a client's own data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.flower.api import ClientApp, Context, Message, RecordDict
from onnxtrain.flower.local_round import LocalRound, Settings
from onnxtrain.flower.places import Place, resolved
from onnxtrain.flower.records import ARRAYS, CONFIG, METRICS
from onnxtrain.training import Trainer


def client_app(
    artifacts: Place,
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
        place = resolved(artifacts, context)
        label = "" if isinstance(place, Artifacts) else os.fspath(place)
        if label not in opened:
            opened[label] = LocalRound(Trainer(place, device=device, threads=threads))
        return opened[label]

    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: dict[str, Any] = dict(message.content.config_records.get(CONFIG, {}))
        mine = local(context)
        _check_proximal(config, mine.manifest.optimizer)
        arrays, metrics = mine.train(
            message.content.array_records[ARRAYS],
            _own(data, context),
            settings.completed(config),
            int(config.get("server-round", 0)),
            context.state,
        )
        return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        chosen = data if validation is None else validation
        arrays = message.content.array_records[ARRAYS]
        metrics = local(context).evaluate(arrays, _own(chosen, context), context.state)
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def _own(data: Any, context: Context) -> Any:
    """Return the data of this client."""
    return data(context) if inspect.isfunction(data) or inspect.ismethod(data) else data


def _check_proximal(config: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    wanted, built = float(config.get("proximal-mu", 0.0)), float(optimizer.get("proximal", 0.0))
    if "proximal-mu" in config and wanted != built:
        raise OnnxTrainError(
            f"the server asks for a proximal term of {wanted:g}, these artifacts have {built:g}\n"
            f"hint: build(..., optimizer='sgd:proximal={wanted:g}')"
        )
