"""The ServerApp: rounds by a strategy of Flower, from the weights of artifacts.

A strategy around another one, which looks at replies before they are averaged.

Whether a client's reply may enter the mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.flower.client import Settings
from onnxtrain.flower.messages import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    Array,
    ArrayRecord,
    ArtifactsSource,
    ConfigRecord,
    Context,
    FedAvg,
    Grid,
    Message,
    MetricRecord,
    RecordDict,
    Result,
    ServerApp,
    Strategy,
    exchanged_tensors,
    pseudo_gradient,
    resolve_artifacts,
    to_record,
)
from onnxtrain.manifest import WeightSpec
from onnxtrain.training import Trainer

_MAX_HEADER_BYTES = 4096  # bytes: more than numpy writes in front of an array
_MAX_LISTED_NAMES = 3


class UnfitReplyError(OnnxTrainError, ValueError):
    """A client's reply is not what its artifacts allow."""


def check_arrays(content: RecordDict, specs: Sequence[WeightSpec]) -> dict[str, np.ndarray]:
    """Return the tensors of a reply.

    Sizes are looked at before anything is unpacked.

    Raises:
        UnfitReplyError: naming the tensor that is missing, unknown, too large, of another shape or
            type, or not finite.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"{len(records)} records of arrays, where one is expected")
    wanted = {s.name: s for s in specs}
    _check_same_names("array", wanted, records[0])
    return {name: _read_tensor(spec, records[0][name]) for name, spec in wanted.items()}


def _check_same_names(what: str, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    odd = [f"no {what} {n!r}" for n in wanted if n not in given]
    odd += [f"an unknown {what} {n!r}" for n in given if n not in wanted]
    if odd:
        more = f" and {len(odd) - _MAX_LISTED_NAMES} more" if len(odd) > _MAX_LISTED_NAMES else ""
        raise UnfitReplyError("; ".join(odd[:_MAX_LISTED_NAMES]) + more)


def _read_tensor(spec: WeightSpec, array: Array) -> np.ndarray:
    shape = tuple(spec.shape)
    dtype = np.dtype(spec.dtype)
    label = repr(spec.name)
    if tuple(array.shape) != shape or array.dtype != spec.dtype:
        raise UnfitReplyError(
            f"{label} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}"
        )
    most = math.prod(shape) * dtype.itemsize + _MAX_HEADER_BYTES
    if len(array.data) > most:
        raise UnfitReplyError(f"{label} has {len(array.data):,} bytes, more than {most:,}")
    try:
        value = array.numpy()
    except Exception as error:  # damaged files raise anything
        raise UnfitReplyError(f"{label} cannot be read: {error}") from error
    if value.shape != shape or value.dtype != dtype:  # the file may differ from what was announced
        raise UnfitReplyError(f"{label} holds {value.dtype}{list(value.shape)}")
    if not np.isfinite(value).all():
        raise UnfitReplyError(f"{label} has values that are infinite or NaN")
    return value


def check_metrics(
    content: RecordDict, needed: Sequence[str], most_examples: float
) -> dict[str, Any]:
    """Return the metrics of a reply.

    Raises:
        UnfitReplyError: naming the number that is missing, no number, not finite, or out of range.
    """
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"{len(records)} records of metrics, where one is expected")
    metrics = dict(records[0])
    missing = [n for n in (EXAMPLES, *needed) if n not in metrics]
    if missing:
        raise UnfitReplyError(f"no metric {missing[0]!r}")
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if not math.isfinite(number):
                raise UnfitReplyError(f"metric {name!r} is {number}")
    examples = metrics[EXAMPLES]
    if isinstance(examples, list) or not 0 < examples <= most_examples:
        raise UnfitReplyError(f"{EXAMPLES!r} is {examples}, not a number up to {most_examples:g}")
    return metrics


def update_norm(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    """Return the joint Euclidean norm of all differences."""
    parts = (np.linalg.norm((after[n].astype(np.float64) - before[n]).ravel()) for n in after)
    return float(math.hypot(*parts))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A reply that did not enter the mean."""

    round: int
    node: int
    reason: str


class CheckedStrategy(Strategy):
    """Passes a round to another strategy, without the replies that do not fit.

    Flower's own strategies end the run at a wrong shape or name, and average NaN. Here such a reply
    is refused by the name of its tensor, and the round goes on with the others.

    Args:
        strategy: any strategy of Flower that averages records, its privacy wrappers too.
        specs: the tensors that have to come back.
        metrics: the numbers that every reply to training needs besides the number of examples.
        largest_update: refuse replies further than this from the weights that were sent out.
        most_examples: refuse replies that claim more; a claim is the weight in the mean.
        keep_updates: keep what each client changed in the last round, in ``updates``.
        report: a file that gets a line of JSON per round: loss, who took part, who was refused,
            who did not answer in time.
    """

    def __init__(
        self,
        strategy: Strategy,
        specs: Sequence[WeightSpec],
        *,
        metrics: Sequence[str] = ("loss",),
        largest_update: float | None = None,
        most_examples: float = 1e9,
        keep_updates: bool = False,
        report: str | os.PathLike[str] | None = None,
    ) -> None:
        self.strategy, self.specs, self.metrics = strategy, tuple(specs), tuple(metrics)
        self.largest_update, self.most_examples = largest_update, most_examples
        self.keep_updates = keep_updates
        self.report = None if report is None else Path(report)
        self.refusals: list[Refusal] = []
        self.updates: dict[int, dict[str, np.ndarray]] = {}
        """By node: the weights sent out less those that came back, in the last round."""
        self.pseudo_gradient: dict[str, np.ndarray] = {}
        """The weights sent out less the new global ones, of the last round."""
        self._sent: dict[str, np.ndarray] = {}
        self._recipients: set[int] = set()

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy wants to send."""
        self._sent = {n: arrays[n].numpy() for n in arrays}
        return self._record_recipients(
            self.strategy.configure_train(server_round, arrays, config, grid)
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean of the replies that fit; nothing changes if there is none."""
        self.updates, good, failed = {}, [], []
        for reply in replies:
            if reply.has_error():
                failed.append(reply)
                continue
            try:
                good.append((reply, self._checked_metrics(reply)))
            except UnfitReplyError as error:
                self._refuse(server_round, reply, error)
        if not good:
            self._write(server_round, "train", good, failed, None)
            return None, None
        common = set.intersection(*(set(metrics) for _, metrics in good))
        for reply, metrics in good:
            numbers = MetricRecord({n: v for n, v in metrics.items() if n in common})
            reply.content = _normalize_names(reply.content, numbers)
        kept = [reply for reply, _ in good]
        arrays, means = self.strategy.aggregate_train(server_round, [*kept, *failed])
        if arrays is not None:
            arrays = self._global_weights(arrays)
        self._write(server_round, "train", good, failed, means)
        return arrays, means

    def _record_recipients(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages, and remember whom they go to."""
        messages = list(messages)
        self._recipients = {m.metadata.dst_node_id for m in messages}
        return messages

    def _checked_metrics(self, reply: Message) -> dict[str, Any]:
        """Return the metrics of a reply that may be averaged."""
        arrays = check_arrays(reply.content, self.specs)
        metrics = check_metrics(reply.content, self.metrics, self.most_examples)
        if self.largest_update is not None:
            far = update_norm(self._sent, arrays)
            if far > self.largest_update:
                raise UnfitReplyError(f"its update has norm {far:g}, above {self.largest_update:g}")
        if self.keep_updates:
            self.updates[reply.metadata.src_node_id] = pseudo_gradient(self._sent, arrays)
        return metrics

    def _global_weights(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the new global weights in the types and the order of the artifacts."""
        new = {s.name: arrays[s.name].numpy().astype(s.dtype, copy=False) for s in self.specs}
        self.pseudo_gradient = pseudo_gradient(self._sent, new)
        return to_record(new)

    def _refuse(self, server_round: int, reply: Message, error: UnfitReplyError) -> None:
        refusal = Refusal(server_round, reply.metadata.src_node_id, str(error))
        self.refusals.append(refusal)
        print(f"round {server_round}: refused node {refusal.node}: {refusal.reason}", flush=True)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy wants to send."""
        return self._record_recipients(
            self.strategy.configure_evaluate(server_round, arrays, config, grid)
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the metrics that fit."""
        good, failed = [], []
        for reply in replies:
            if reply.has_error():
                failed.append(reply)
                continue
            try:
                metrics = check_metrics(reply.content, self.metrics, self.most_examples)
            except UnfitReplyError as error:
                self._refuse(server_round, reply, error)
            else:
                good.append((reply, metrics))
        if not good:
            return None
        common = set.intersection(*(set(metrics) for _, metrics in good))
        for reply, metrics in good:
            numbers = MetricRecord({n: v for n, v in metrics.items() if n in common})
            reply.content = RecordDict({METRICS: numbers})
        kept = [reply for reply, _ in good]
        means = self.strategy.aggregate_evaluate(server_round, [*kept, *failed])
        self._write(server_round, "evaluate", good, failed, means)
        return means

    def _write(
        self,
        server_round: int,
        kind: str,
        good: Sequence[tuple[Message, dict[str, Any]]],
        failed: Sequence[Message],
        means: MetricRecord | None,
    ) -> None:
        if self.report is None:
            return
        refused = {r.node: r.reason for r in self.refusals if r.round == server_round}
        answered = {r.metadata.src_node_id for r in [*(r for r, _ in good), *failed]}
        line = {
            "round": server_round,
            "kind": kind,
            "metrics": dict(means or {}),
            # As text: they have 64 bits, and pages read numbers of 53.
            "nodes": {str(r.metadata.src_node_id): m[EXAMPLES] for r, m in good},
            "failed": [str(r.metadata.src_node_id) for r in failed],
            "refused": {str(node): reason for node, reason in refused.items()},
            "silent": [str(node) for node in sorted(self._recipients - answered - refused.keys())],
        }
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _normalize_names(content: RecordDict, metrics: MetricRecord) -> RecordDict:
    """Return a reply's content with its arrays and metrics by the names that all replies have."""
    (arrays,) = content.array_records.values()
    return RecordDict({ARRAYS: arrays, METRICS: metrics, **content.config_records})


STATISTICS = ("average", "local")


def server_app(
    artifacts: ArtifactsSource,
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
        place = resolve_artifacts(artifacts, context)
        own = place if isinstance(place, Artifacts) else Artifacts.load(place)
        run = context.run_config
        made = strategy(context) if callable(strategy) else strategy
        inner = FedAvg() if made is None else made
        _check_proximal(inner, own)
        specs = exchanged_tensors(own.manifest, statistics=statistics == "average")
        usual = {"metrics": _metrics(own), "report": run.get("report") or None}
        checked = CheckedStrategy(inner, specs, **{**usual, **checks})
        trainer = None if validation is None else Trainer(own)
        result = checked.start(
            grid=grid,
            initial_arrays=to_record({s.name: np.array(own.values[s.name]) for s in specs}),
            num_rounds=_resolve_rounds(rounds, run),
            timeout=timeout,
            train_config=_train_config(config or {}, run),
            evaluate_fn=None if trainer is None else _central_evaluation(trainer, validation),
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


def _resolve_rounds(given: int | None, run: Mapping[str, Any]) -> int:
    return int(given or run.get("rounds") or run.get("num-server-rounds") or 3)


_CLIENT_SETTINGS = ("epochs", "batch-size", "lr", "shuffle", "seed", "optimizer-state")


def _train_config(config: Mapping[str, Any], run: Mapping[str, Any]) -> ConfigRecord:
    """Return what clients are told; names that they would not understand are refused."""
    unknown = [n for n in config if n not in _CLIENT_SETTINGS]
    if unknown:
        raise OnnxTrainError(
            f"clients know no setting {unknown[0]!r}\nhint: one of {', '.join(_CLIENT_SETTINGS)}"
        )
    settings = {**config, **{n: run[n] for n in _CLIENT_SETTINGS if n in run}}
    Settings(optimizer_state=settings.get("optimizer-state"))
    return ConfigRecord(settings)


def _metrics(artifacts: Artifacts) -> tuple[str, ...]:
    spec = artifacts.manifest.model("eval")
    names = [] if spec is None else [t.name for t in spec.outputs_of("metric")]
    return ("loss", *names)


def _central_evaluation(trainer: Trainer, data: Any) -> Callable[[int, ArrayRecord], MetricRecord]:
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
