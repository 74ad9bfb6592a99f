"""The ServerApp: rounds by a strategy of Flower, from the weights of artifacts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.flower.api import (
    ArrayRecord,
    ConfigRecord,
    Context,
    FedAvg,
    Grid,
    MetricRecord,
    Result,
    ServerApp,
    Strategy,
)
from onnxtrain.flower.checked_strategy import CheckedStrategy
from onnxtrain.flower.local_round import Settings
from onnxtrain.flower.places import Place, resolved
from onnxtrain.flower.records import to_record, travelling
from onnxtrain.training import Trainer

STATISTICS = ("average", "local")


def server_app(
    artifacts: Place,
    strategy: Strategy | Callable[[Context], Strategy] | None = None,
    *,
    rounds: int | None = None,
    statistics: str = "average",
    config: Mapping[str, Any] | None = None,
    validation: Any = None,
    out: str | os.PathLike[str] | None = None,
    timeout: float = 3600.0,
    on_result: Callable[[Result, CheckedStrategy], None] | None = None,
    **checks: Any,
) -> ServerApp:
    """Return a ServerApp that trains artifacts by rounds.

    Args:
        artifacts: what :func:`onnxtrain.build` gave, or a directory, or a function from Flower's
            ``Context`` to one of these.
        strategy: any strategy of Flower that averages records, or a function from Flower's
            ``Context`` to one; ``FedAvg`` by default. Replies are checked before it sees them
            (:class:`CheckedStrategy`).
        rounds: how many; else the run's ``rounds`` or ``num-server-rounds``, else 3.
        statistics: ``"average"`` sends running statistics of BatchNormalization with the weights,
            ``"local"`` leaves each client its own.
        config: what clients are told: ``epochs``, ``batch-size``, ``lr``, ``shuffle``, ``seed``,
            ``optimizer-state``; the run's configuration wins.
        validation: data that the server evaluates the global weights on, after each round.
        out: where the global weights go in the end, as a checkpoint of the artifacts; else the
            run's ``out``.
        timeout: seconds that a round waits for replies.
        on_result: gets the result and the strategy in the end.
        **checks: options of :class:`CheckedStrategy`.
    """
    if statistics not in STATISTICS:
        raise OnnxTrainError(f"no such statistics: {statistics!r}\nhint: average or local")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        place = resolved(artifacts, context)
        own = place if isinstance(place, Artifacts) else Artifacts.load(place)
        run = context.run_config
        made = strategy(context) if callable(strategy) else strategy
        inner = FedAvg() if made is None else made
        _check_proximal(inner, own)
        specs = travelling(own.manifest, statistics=statistics == "average")
        usual = {"metrics": _metrics(own), "report": run.get("report") or None}
        checked = CheckedStrategy(inner, specs, **{**usual, **checks})
        trainer = None if validation is None else Trainer(own)
        result = checked.start(
            grid=grid,
            initial_arrays=to_record({s.name: np.array(own.values[s.name]) for s in specs}),
            num_rounds=_rounds(rounds, run),
            timeout=timeout,
            train_config=_told(config or {}, run),
            evaluate_fn=None if trainer is None else _central(trainer, validation),
        )
        target = out or str(run.get("out") or "")
        if target and result.arrays:  # there are none where every reply was refused
            save_global(own, result.arrays, target)
        if on_result is not None:
            on_result(result, checked)

    return app


def save_global(artifacts: Artifacts, arrays: ArrayRecord, path: str | os.PathLike[str]) -> None:
    """Write global weights as a checkpoint of the artifacts, which ``onnxtrain export`` takes."""
    trainer = Trainer(artifacts)
    trainer.load_weights({n: arrays[n].numpy() for n in arrays}, strict=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    trainer.save(path)


def _rounds(given: int | None, run: Mapping[str, Any]) -> int:
    return int(given or run.get("rounds") or run.get("num-server-rounds") or 3)


_TOLD = ("epochs", "batch-size", "lr", "shuffle", "seed", "optimizer-state")


def _told(config: Mapping[str, Any], run: Mapping[str, Any]) -> ConfigRecord:
    """Return what clients are told; names that they would not understand are refused."""
    unknown = [n for n in config if n not in _TOLD]
    if unknown:
        raise OnnxTrainError(
            f"clients know no setting {unknown[0]!r}\nhint: one of {', '.join(_TOLD)}"
        )
    told = {**config, **{n: run[n] for n in _TOLD if n in run}}
    Settings(optimizer_state=told.get("optimizer-state"))
    return ConfigRecord(told)


def _metrics(artifacts: Artifacts) -> tuple[str, ...]:
    spec = artifacts.manifest.model("eval")
    names = [] if spec is None else [t.name for t in spec.outputs_of("metric")]
    return ("loss", *names)


def _central(trainer: Trainer, data: Any) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return a function that evaluates global weights."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        trainer.load_weights({n: arrays[n].numpy() for n in arrays}, strict=False)
        return MetricRecord(dict(trainer.evaluate(data).to_dict()))

    return evaluate


def _check_proximal(strategy: Strategy, artifacts: Artifacts) -> None:
    inner: Any = strategy
    while inner is not None and not hasattr(inner, "proximal_mu"):
        inner = getattr(inner, "strategy", None)
    if inner is None:
        return
    built = float(artifacts.manifest.optimizer.get("proximal", 0.0))
    if built != inner.proximal_mu:
        raise OnnxTrainError(
            f"the strategy has proximal_mu={inner.proximal_mu:g}, these artifacts {built:g}\n"
            f"hint: build(..., optimizer='sgd:proximal={inner.proximal_mu:g}')"
        )
