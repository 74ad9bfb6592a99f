"""The ServerApp: rounds of a Flower strategy over artifacts, with a check of every reply.

``check_arrays`` and ``check_metrics`` validate one reply, ``CheckedStrategy`` applies them before
any other strategy aggregates, and ``server_app`` wraps the result in a Flower ``ServerApp``.
``ReplyReader`` keeps replies apart that Flower reads together: one that it cannot read is refused
alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError

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
_MAX_REASON_LENGTH = 300  # reasons contain names that clients choose
_MAX_METRICS, _MAX_METRIC_NAME_LENGTH = 100, 200
_MAX_METRIC = float(np.finfo(np.float32).max)
_MOST_EXAMPLES = 1e9
_RATIO = 10.0
"""Default limits of a reply, as multiples of the other replies' median: examples and norm."""
_POLL_SECONDS = 3.0  # as Flower's own grids


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
    if not isinstance(value, np.ndarray):  # np.load also reads archives
        raise UnfitReplyError(f"{label} cannot be read: it is not an .npy file")
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
    """Return the metrics of a reply: numbers, and lists of numbers that are not required.

    Raises:
        UnfitReplyError: if a metric is missing, not a number, not finite or out of range.
    """
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise UnfitReplyError(f"expected one metric record, got {len(records)}")
    metrics: dict[str, Any] = dict(records[0])
    missing = [n for n in (EXAMPLES, *required) if n not in metrics]
    if missing:
        raise UnfitReplyError(f"missing metric {missing[0]!r}")
    values = sum(len(v) if isinstance(v, list) else 1 for v in metrics.values())
    if values > _MAX_METRICS:
        raise UnfitReplyError(f"it has {values:,} metrics, more than {_MAX_METRICS}")
    for name, value in metrics.items():
        if len(name) > _MAX_METRIC_NAME_LENGTH:
            raise UnfitReplyError(f"the name of a metric has {len(name):,} characters")
        if isinstance(value, list) and name in (EXAMPLES, *required):
            raise UnfitReplyError(f"metric {name!r} is a list, expected a number")
        for number in value if isinstance(value, list) else [value]:
            if not abs(number) <= _MAX_METRIC:
                raise UnfitReplyError(f"metric {name!r} is {number:g}")
    examples = metrics[EXAMPLES]
    if not 0 < examples <= most_examples:
        raise UnfitReplyError(
            f"{EXAMPLES!r} is {examples}, expected a number up to {most_examples:g}"
        )
    return metrics


def _shared_metrics(replies: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the metrics that all replies have, as numbers or as lists of one length."""

    def forms(metrics: Mapping[str, Any]) -> set[tuple[str, int]]:
        return {(n, len(v) if isinstance(v, list) else -1) for n, v in metrics.items()}

    return {name for name, _ in set.intersection(*map(forms, replies))}


def update_norm(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    """Return the global L2 norm of ``after - before``."""
    norms = (np.linalg.norm((after[n].astype(np.float64) - before[n]).ravel()) for n in after)
    return float(math.hypot(*norms))


def _largest_norm(norms: Sequence[float], weights: Mapping[str, np.ndarray]) -> float:
    """Return the default limit of an update's norm: ten times the median of a round.

    The median of fewer than three replies, or of unchanged ones, says nothing: then it is ten times
    the norm of the weights.
    """
    typical = median_low(norms) if len(norms) > 2 else 0.0
    zeros = {n: np.zeros_like(a) for n, a in weights.items()}
    return _RATIO * (typical or update_norm(zeros, weights)) or math.inf


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A reply that was rejected before aggregation."""

    round: int
    node: int
    reason: str


_UNREADABLE = (
    *(ArithmeticError, AttributeError, DecodeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What reading a malformed message raises; network errors are others."""


class ReplyReader:
    """Read the replies of a grid one by one, so that a malformed one does not end the run.

    Flower's grids read all replies that have arrived at once. The first malformed one raises, and
    those before it are lost.
    """

    def __init__(self, grid: Grid, refuse: Callable[[int, str], None]) -> None:
        self._grid, self._refuse = grid, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the replies that arrive in time and can be read; refuse malformed ones."""
        messages = list(messages)
        pushed = list(self._grid.push_messages(messages))
        nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        waiting = {message_id: nodes[message_id] for message_id in pushed if message_id}
        end = math.inf if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting:
            for message_id, node in list(waiting.items()):
                try:
                    received = list(self._grid.pull_messages([message_id]))
                except _UNREADABLE as error:
                    self._refuse(node, f"it cannot be read: {type(error).__name__}: {error}")
                    del waiting[message_id]
                    continue
                if received:
                    replies += received
                    del waiting[message_id]
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            if waiting:
                time.sleep(min(_POLL_SECONDS, remaining))
        return replies


class CheckedStrategy(Strategy):
    """Wrap a strategy and reject invalid replies before it aggregates them.

    Flower's own strategies abort the run on a wrong shape or name, and average NaN. Here the reply
    is rejected with the name of its tensor, and the round continues with the other replies.

    Args:
        strategy: any Flower strategy that averages records, including its privacy wrappers.
        specs: the tensors that every reply must contain.
        metrics: the metrics that every reply must contain, besides the number of examples.
        largest_update: reject replies whose update has a larger global norm; by default ten times
            the median norm of the round, or ten times the norm of the weights if fewer than three
            clients replied.
        most_examples: reject replies that claim more examples; the claim is the weight in the mean.
            By default a claim weighs at most ten times the median claim of the round.
        keep_updates: store each client's update of the last round in ``updates``.
        report: a JSON Lines file, one line per round: metrics, participating nodes with their
            weights, nodes with capped weights, rejected nodes, and nodes that did not answer in
            time.
    """

    def __init__(
        self,
        strategy: Strategy,
        specs: Sequence[WeightSpec],
        *,
        metrics: Sequence[str] = ("loss",),
        largest_update: float | None = None,
        most_examples: float | None = None,
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
        self._round, self._refused = 0, {}
        """The current exchange: its round, and the refused nodes with the reasons."""

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.strategy.summary()

    def start(self, grid: Grid, *arguments: Any, **options: Any) -> Result:
        """Run the rounds of the strategy over a grid."""
        reader = cast("Grid", ReplyReader(grid, self._refuse))
        return super().start(reader, *arguments, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy."""
        self._sent = {n: arrays[n].numpy() for n in arrays}
        messages = self.strategy.configure_train(server_round, arrays, config, grid)
        return self._begin_exchange(server_round, messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies; ``(None, None)`` keeps the weights if there are none."""
        self.updates = {}
        norms: dict[int, float] = {}
        good, failed = self._checked(replies, norms)
        limit = self.largest_update
        if limit is None:
            limit = _largest_norm(list(norms.values()), self._sent)
        for node in [node for node, norm in norms.items() if not norm <= limit]:
            self._refuse(node, f"its update has norm {norms[node]:g}, above {limit:g}")
            self.updates.pop(node, None)
        good = [(reply, m) for reply, m in good if reply.metadata.src_node_id not in self._refused]
        capped = self._cap_examples(good)
        arrays, means = None, None
        if good:
            shared = _shared_metrics([metrics for _, metrics in good])
            for reply, metrics in good:
                record = MetricRecord({n: v for n, v in metrics.items() if n in shared})
                reply.content = _normalize_names(reply.content, record)
            valid = [reply for reply, _ in good]
            arrays, means = self.strategy.aggregate_train(server_round, [*valid, *failed])
        if arrays is not None:
            arrays = self._global_weights(arrays)
        self._write("train", good, failed, capped, means)
        return arrays, means

    def _begin_exchange(self, server_round: int, messages: Iterable[Message]) -> list[Message]:
        """Return the messages, and record the nodes they are sent to."""
        messages = list(messages)
        self._recipients = {m.metadata.dst_node_id for m in messages}
        self._round, self._refused = server_round, {}
        return messages

    def _checked(
        self, replies: Iterable[Message], norms: dict[int, float] | None = None
    ) -> tuple[list[tuple[Message, dict[str, Any]]], list[Message]]:
        """Return the valid replies with their metrics, and the clients' errors; refuse others.

        Of replies to training, which contain weights, the norms of the updates are written to
        ``norms``.
        """
        good, failed = [], []
        most = _MOST_EXAMPLES if self.most_examples is None else self.most_examples
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                failed.append(reply)
                continue
            try:
                arrays = {} if norms is None else check_arrays(reply.content, self.specs)
                good.append((reply, check_metrics(reply.content, self.metrics, most)))
            except UnfitReplyError as error:
                self._refuse(node, str(error))
                continue
            if norms is not None:
                norms[node] = update_norm(self._sent, arrays)
                if self.keep_updates:
                    self.updates[node] = pseudo_gradient(self._sent, arrays)
        return good, failed

    def _cap_examples(self, good: Sequence[tuple[Message, dict[str, Any]]]) -> dict[int, float]:
        """Limit the examples of each reply, in place; return the claims of those that changed."""
        capped: dict[int, float] = {}
        if good and self.most_examples is None:
            most = _RATIO * median_low(metrics[EXAMPLES] for _, metrics in good)
            for reply, metrics in good:
                if metrics[EXAMPLES] > most:
                    capped[reply.metadata.src_node_id] = metrics[EXAMPLES]
                    metrics[EXAMPLES] = most
        return capped

    def _global_weights(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the new global weights with the types and the order of the artifacts."""
        new = {s.name: arrays[s.name].numpy().astype(s.dtype, copy=False) for s in self.specs}
        self.pseudo_gradient = pseudo_gradient(self._sent, new)
        return to_record(new)

    def _refuse(self, node: int, reason: str) -> None:
        printable = "".join(c if c.isprintable() else " " for c in reason[:_MAX_REASON_LENGTH])
        self._refused[node] = printable
        self.refusals.append(Refusal(self._round, node, printable))
        print(f"round {self._round}: rejected node {node}: {printable}", flush=True)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy."""
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return self._begin_exchange(server_round, messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the metrics of the valid replies."""
        good, failed = self._checked(replies)
        capped = self._cap_examples(good)
        means = None
        if good:
            shared = _shared_metrics([metrics for _, metrics in good])
            for reply, metrics in good:
                record = MetricRecord({n: v for n, v in metrics.items() if n in shared})
                reply.content = RecordDict({METRICS: record})
            valid = [reply for reply, _ in good]
            means = self.strategy.aggregate_evaluate(server_round, [*valid, *failed])
        if self._recipients:
            self._write("evaluate", good, failed, capped, means)
        return means

    def _write(
        self,
        kind: str,
        good: Sequence[tuple[Message, dict[str, Any]]],
        failed: Sequence[Message],
        capped: Mapping[int, float],
        means: MetricRecord | None,
    ) -> None:
        if self.report is None:
            return
        answered = {r.metadata.src_node_id for r in [*(r for r, _ in good), *failed]}
        silent = self._recipients - answered - self._refused.keys()
        line = {
            "round": self._round,
            "kind": kind,
            "metrics": dict(means or {}),
            # As strings: node ids have 64 bits, JavaScript numbers 53.
            "nodes": {str(r.metadata.src_node_id): m[EXAMPLES] for r, m in good},
            "capped": {str(node): claim for node, claim in capped.items()},
            "failed": [str(r.metadata.src_node_id) for r in failed],
            "refused": {str(node): reason for node, reason in self._refused.items()},
            "silent": [str(node) for node in sorted(silent)],
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
