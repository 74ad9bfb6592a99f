"""The ServerApp: rounds of a Flower strategy over artifacts, with a check of every reply.

``check_arrays`` and ``check_metrics`` validate one reply, ``CheckedStrategy`` applies them before
any other strategy aggregates, and ``server_app`` wraps the result in a Flower ``ServerApp``.
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
from onnxtrain.errors import OnnxTrainError, expected_one_of
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

_MAX_HEADER_BYTES = 4096  # above the size of any .npy header
_MAX_LISTED_NAMES = 3


class UnfitReplyError(OnnxTrainError, ValueError):
    """A client's reply does not match the artifacts."""


def check_arrays(content: RecordDict, specs: Sequence[WeightSpec]) -> dict[str, np.ndarray]:
    """Return the tensors of a reply; check sizes before decoding anything.

    Raises:
        UnfitReplyError: if a tensor is missing, unknown, too large, not finite, or has another
            shape or type.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"expected one array record, got {len(records)}")
    expected = {s.name: s for s in specs}
    _check_same_names("array", expected, records[0])
    return {name: _read_tensor(spec, records[0][name]) for name, spec in expected.items()}


def _check_same_names(what: str, expected: Mapping[str, Any], received: Mapping[str, Any]) -> None:
    problems = [f"missing {what} {n!r}" for n in expected if n not in received]
    problems += [f"unknown {what} {n!r}" for n in received if n not in expected]
    if problems:
        omitted = len(problems) - _MAX_LISTED_NAMES
        more = f" and {omitted} more" if omitted > 0 else ""
        raise UnfitReplyError("; ".join(problems[:_MAX_LISTED_NAMES]) + more)


def _read_tensor(spec: WeightSpec, array: Array) -> np.ndarray:
    shape = tuple(spec.shape)
    dtype = np.dtype(spec.dtype)
    label = repr(spec.name)
    if tuple(array.shape) != shape or array.dtype != spec.dtype:
        raise UnfitReplyError(
            f"{label} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
        )
    limit = math.prod(shape) * dtype.itemsize + _MAX_HEADER_BYTES
    if len(array.data) > limit:
        raise UnfitReplyError(f"{label} has {len(array.data):,} bytes, more than {limit:,}")
    try:
        value = array.numpy()
    except Exception as error:  # numpy raises any exception on malformed data
        raise UnfitReplyError(f"{label} cannot be read: {error}") from error
    # The decoded array may differ from the shape and type that the record declares.
    if value.shape != shape or value.dtype != dtype:
        raise UnfitReplyError(
            f"{label} contains {value.dtype}{list(value.shape)}, expected {dtype}{list(shape)}"
        )
    if not np.isfinite(value).all():
        raise UnfitReplyError(f"{label} has values that are infinite or NaN")
    return value


def check_metrics(
    content: RecordDict, required: Sequence[str], most_examples: float
) -> dict[str, Any]:
    """Return the metrics of a reply.

    Raises:
        UnfitReplyError: if a metric is missing, not finite or out of range.
    """
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"expected one metric record, got {len(records)}")
    metrics = dict(records[0])
    missing = [n for n in (EXAMPLES, *required) if n not in metrics]
    if missing:
        raise UnfitReplyError(f"missing metric {missing[0]!r}")
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if not math.isfinite(number):
                raise UnfitReplyError(f"metric {name!r} is {number}")
    examples = metrics[EXAMPLES]
    if isinstance(examples, list) or not 0 < examples <= most_examples:
        raise UnfitReplyError(
            f"{EXAMPLES!r} is {examples}, expected a number up to {most_examples:g}"
        )
    return metrics


def update_norm(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    """Return the global L2 norm of ``after - before``."""
    norms = (np.linalg.norm((after[n].astype(np.float64) - before[n]).ravel()) for n in after)
    return float(math.hypot(*norms))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A reply that was rejected before aggregation."""

    round: int
    node: int
    reason: str


class CheckedStrategy(Strategy):
    """Wrap a strategy and reject invalid replies before it aggregates them.

    Flower's own strategies abort the run on a wrong shape or name, and average NaN. Here the reply
    is rejected with the name of its tensor, and the round continues with the other replies.

    Args:
        strategy: any Flower strategy that averages records, including its privacy wrappers.
        specs: the tensors that every reply must contain.
        metrics: the metrics that every reply must contain, besides the number of examples.
        largest_update: reject replies whose update has a larger global norm.
        most_examples: reject replies that claim more examples; the claim is the weight in the mean.
        keep_updates: store each client's update of the last round in ``updates``.
        report: a JSON Lines file, one line per round: metrics, participating nodes, rejected nodes,
            and nodes that did not answer in time.
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
        """By node: sent weights minus returned weights, in the last round."""
        self.pseudo_gradient: dict[str, np.ndarray] = {}
        """Sent weights minus new global weights, in the last round."""
        self._sent: dict[str, np.ndarray] = {}
        self._recipients: set[int] = set()

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy."""
        self._sent = {n: arrays[n].numpy() for n in arrays}
        return self._record_recipients(
            self.strategy.configure_train(server_round, arrays, config, grid)
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies; ``(None, None)`` keeps the weights if there are none."""
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
            shared = MetricRecord({n: v for n, v in metrics.items() if n in common})
            reply.content = _normalize_names(reply.content, shared)
        valid = [reply for reply, _ in good]
        arrays, means = self.strategy.aggregate_train(server_round, [*valid, *failed])
        if arrays is not None:
            arrays = self._global_weights(arrays)
        self._write(server_round, "train", good, failed, means)
        return arrays, means

    def _record_recipients(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages, and record the nodes they are sent to."""
        messages = list(messages)
        self._recipients = {m.metadata.dst_node_id for m in messages}
        return messages

    def _checked_metrics(self, reply: Message) -> dict[str, Any]:
        """Return the metrics of a valid reply; raise for any other."""
        arrays = check_arrays(reply.content, self.specs)
        metrics = check_metrics(reply.content, self.metrics, self.most_examples)
        if self.largest_update is not None:
            norm = update_norm(self._sent, arrays)
            if norm > self.largest_update:
                raise UnfitReplyError(
                    f"its update has norm {norm:g}, above {self.largest_update:g}"
                )
        if self.keep_updates:
            self.updates[reply.metadata.src_node_id] = pseudo_gradient(self._sent, arrays)
        return metrics

    def _global_weights(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the new global weights with the types and the order of the artifacts."""
        new = {s.name: arrays[s.name].numpy().astype(s.dtype, copy=False) for s in self.specs}
        self.pseudo_gradient = pseudo_gradient(self._sent, new)
        return to_record(new)

    def _refuse(self, server_round: int, reply: Message, error: UnfitReplyError) -> None:
        refusal = Refusal(server_round, reply.metadata.src_node_id, str(error))
        self.refusals.append(refusal)
        print(f"round {server_round}: rejected node {refusal.node}: {refusal.reason}", flush=True)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy."""
        return self._record_recipients(
            self.strategy.configure_evaluate(server_round, arrays, config, grid)
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the metrics of the valid replies."""
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
            shared = MetricRecord({n: v for n, v in metrics.items() if n in common})
            reply.content = RecordDict({METRICS: shared})
        valid = [reply for reply, _ in good]
        means = self.strategy.aggregate_evaluate(server_round, [*valid, *failed])
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
            # As strings: node ids have 64 bits, JavaScript numbers 53.
            "nodes": {str(r.metadata.src_node_id): m[EXAMPLES] for r, m in good},
            "failed": [str(r.metadata.src_node_id) for r in failed],
            "refused": {str(node): reason for node, reason in refused.items()},
            "silent": [str(node) for node in sorted(self._recipients - answered - refused.keys())],
        }
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _normalize_names(content: RecordDict, metrics: MetricRecord) -> RecordDict:
    """Return a reply's content with its arrays and metrics under the standard keys."""
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
    """Return a ServerApp that trains artifacts in rounds.

    Args:
        artifacts: the result of :func:`onnxtrain.build`, its directory, or a function of Flower's
            ``Context`` that returns one of these.
        strategy: any Flower strategy that averages records, or a function of Flower's ``Context``
            that returns one; ``FedAvg`` by default. :class:`CheckedStrategy` wraps it.
        rounds: number of rounds; by default the run's ``rounds`` or ``num-server-rounds``, or 3.
        statistics: ``"average"`` sends running statistics of BatchNormalization with the weights,
            ``"local"`` keeps each client's own.
        config: client settings: ``epochs``, ``batch-size``, ``lr``, ``shuffle``, ``seed``,
            ``optimizer-state``; the run's configuration wins.
        validation: data to evaluate the global weights on after each round.
        out: path of the final checkpoint with the global weights; by default the run's ``out``.
        timeout: seconds a round waits for replies.
        on_result: called at the end with the result and the strategy.
        **checks: options of :class:`CheckedStrategy`.
    """
    if statistics not in STATISTICS:
        expected = expected_one_of(statistics, STATISTICS)
        raise OnnxTrainError(f"unknown statistics: {statistics!r} {expected}")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        source = resolve_artifacts(artifacts, context)
        loaded = source if isinstance(source, Artifacts) else Artifacts.load(source)
        run = context.run_config
        inner = (strategy(context) if callable(strategy) else strategy) or FedAvg()
        _check_proximal(inner, loaded)
        specs = exchanged_tensors(loaded.manifest, statistics=statistics == "average")
        defaults = {"metrics": _metrics(loaded), "report": run.get("report") or None}
        checked = CheckedStrategy(inner, specs, **{**defaults, **checks})
        trainer = None if validation is None else Trainer(loaded)
        result = checked.start(
            grid=grid,
            initial_arrays=to_record({s.name: np.array(loaded.values[s.name]) for s in specs}),
            num_rounds=_resolve_rounds(rounds, run),
            timeout=timeout,
            train_config=_train_config(config or {}, run),
            evaluate_fn=None if trainer is None else _central_evaluation(trainer, validation),
        )
        target = out or str(run.get("out") or "")
        if target and result.arrays:  # empty if every reply was rejected
            save_global(loaded, result.arrays, target)
        if on_result is not None:
            on_result(result, checked)

    return app


def save_global(artifacts: Artifacts, arrays: ArrayRecord, path: str | os.PathLike[str]) -> None:
    """Write global weights as a checkpoint of the artifacts, for ``onnxtrain export``."""
    trainer = Trainer(artifacts)
    trainer.load_weights({n: arrays[n].numpy() for n in arrays}, strict=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    trainer.save(path)


def _resolve_rounds(rounds: int | None, run: Mapping[str, Any]) -> int:
    return int(rounds or run.get("rounds") or run.get("num-server-rounds") or 3)


_CLIENT_SETTINGS = ("epochs", "batch-size", "lr", "shuffle", "seed", "optimizer-state")


def _train_config(config: Mapping[str, Any], run: Mapping[str, Any]) -> ConfigRecord:
    """Return the configuration sent to clients; raise for settings they do not have."""
    unknown = [n for n in config if n not in _CLIENT_SETTINGS]
    if unknown:
        raise OnnxTrainError(
            f"unknown client setting: {unknown[0]!r} "
            f"{expected_one_of(unknown[0], _CLIENT_SETTINGS)}"
        )
    settings = {**config, **{n: run[n] for n in _CLIENT_SETTINGS if n in run}}
    Settings(optimizer_state=settings.get("optimizer-state"))
    return ConfigRecord(settings)


def _metrics(artifacts: Artifacts) -> tuple[str, ...]:
    spec = artifacts.manifest.model("eval")
    names = [] if spec is None else [t.name for t in spec.outputs_of("metric")]
    return ("loss", *names)


def _central_evaluation(trainer: Trainer, data: Any) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return the ``evaluate_fn`` of a strategy: loss and metrics of the global weights."""

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
            f"the strategy has proximal_mu={inner.proximal_mu:g}, the artifacts have {built:g}\n"
            f"hint: build(..., optimizer='sgd:proximal={inner.proximal_mu:g}')"
        )
