"""A strategy around another one, which looks at replies before they are averaged."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.flower.api import (
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    MetricRecord,
    RecordDict,
    Strategy,
)
from onnxtrain.flower.check_reply import (
    UnfitReplyError,
    checked_arrays,
    checked_metrics,
    distance,
)
from onnxtrain.flower.records import ARRAYS, EXAMPLES, METRICS, to_record
from onnxtrain.flower.updates import pseudo_gradient
from onnxtrain.manifest import WeightSpec


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
        self._asked: set[int] = set()

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the strategy wants to send."""
        self._sent = {n: arrays[n].numpy() for n in arrays}
        return self._noted(self.strategy.configure_train(server_round, arrays, config, grid))

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
                good.append((reply, self._fitting(reply)))
            except UnfitReplyError as error:
                self._refuse(server_round, reply, error)
        if not good:
            self._write(server_round, "train", good, failed, None)
            return None, None
        common = set.intersection(*(set(metrics) for _, metrics in good))
        for reply, metrics in good:
            numbers = MetricRecord({n: v for n, v in metrics.items() if n in common})
            reply.content = _in_our_names(reply.content, numbers)
        kept = [reply for reply, _ in good]
        arrays, means = self.strategy.aggregate_train(server_round, [*kept, *failed])
        if arrays is not None:
            arrays = self._taken_over(arrays)
        self._write(server_round, "train", good, failed, means)
        return arrays, means

    def _noted(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages, and remember whom they go to."""
        messages = list(messages)
        self._asked = {m.metadata.dst_node_id for m in messages}
        return messages

    def _fitting(self, reply: Message) -> dict[str, Any]:
        """Return the metrics of a reply that may be averaged."""
        arrays = checked_arrays(reply.content, self.specs)
        metrics = checked_metrics(reply.content, self.metrics, self.most_examples)
        if self.largest_update is not None:
            far = distance(self._sent, arrays)
            if far > self.largest_update:
                raise UnfitReplyError(f"its update has norm {far:g}, above {self.largest_update:g}")
        if self.keep_updates:
            self.updates[reply.metadata.src_node_id] = pseudo_gradient(self._sent, arrays)
        return metrics

    def _taken_over(self, arrays: ArrayRecord) -> ArrayRecord:
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
        return self._noted(self.strategy.configure_evaluate(server_round, arrays, config, grid))

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
                metrics = checked_metrics(reply.content, self.metrics, self.most_examples)
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
            "silent": [str(node) for node in sorted(self._asked - answered - refused.keys())],
        }
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _in_our_names(content: RecordDict, metrics: MetricRecord) -> RecordDict:
    """Return a reply's content with its arrays and metrics by the names that all replies have."""
    (arrays,) = content.array_records.values()
    return RecordDict({ARRAYS: arrays, METRICS: metrics, **content.config_records})
