"""Connectionist temporal classification, as a Scan over time.

Let ``e = - l1 - l2 - ... -`` be the labels ``l1 l2 ...`` with blanks between them. ``alpha_t(s)``
is the log-probability of all paths that reach ``e_s`` at time ``t``::

    alpha_t(s) = logp_t(e_s) + log(sum of e^alpha_(t-1)(r)),  r in {s, s - 1, and s - 2 if allowed}

A path may skip from ``s - 2`` to ``s`` if ``e_s`` is a label other than ``e_(s-2)``. The loss is
the negative log of the probability to end at the last label or the blank after it.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.classification import in_range_labels
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import INT64, LOSSES, Loss, TargetSpec, check_rank

# In place of log(0) = -inf, whose differences are NaN.
_LOG_ZERO = -1e30


@LOSSES.named("ctc")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CTC(Loss):
    """Negative log-likelihood of label sequences under unaligned log-probabilities [T, N, C].

    Targets: ``labels`` [N, S] with any padding value; ``input_lengths`` [N]; ``target_lengths``
    [N]. ``mean`` divides each loss by its target length and takes the mean, as in torch. A
    sequence that is too short for its labels has an infinite loss and no gradient.

    Args:
        blank: class index of the blank.
        zero_infinity: replace infinite losses by 0.
        batch_first: the prediction is [N, T, C].
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    blank: int = 0
    zero_infinity: bool = False
    batch_first: bool = False

    reads = Reads.LOG_PROBABILITIES

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the class axis."""
        return 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the labels and the lengths."""
        self._check_rank(prediction)
        times, batch, _ = S.dims_of(prediction) or (None,) * 3
        batch = times if self.batch_first else batch
        return [
            TargetSpec("labels", INT64, (batch, "label_length")),
            TargetSpec("input_lengths", INT64, (batch,)),
            TargetSpec("target_lengths", INT64, (batch,)),
        ]

    def _check_rank(self, prediction: ir.Value) -> None:
        other = "" if self.batch_first else "[T, N, C], or with batch_first=True "
        check_rank(self, prediction, (3,), f"log-probabilities {other}[N, T, C]")

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        self._check_rank(prediction)
        if self.batch_first:
            prediction = op.Transpose(prediction, perm=[1, 0, 2])
        labels, input_lengths, target_lengths = (op.cast(t, INT64) for t in targets)
        if op.rank(labels) != 2:
            raise ShapeError(
                f"CTC does not accept labels {S.describe_value(labels)}\n"
                "hint: pad them to [N, S]; concatenated labels are not supported"
            )
        each = self._each(op, prediction, labels, input_lengths, target_lengths)
        impossible = op.Greater(each, -_LOG_ZERO / 2)
        infinite = op.const(0.0 if self.zero_infinity else math.inf, each.dtype)
        each = op.Where(impossible, infinite, each)
        if self.reduction == "mean":
            lengths = op.Where(op.Equal(target_lengths, 0), op.const(1), target_lengths)
            each = op.Div(each, op.cast(lengths, each.dtype))
        return self.reduce(op, each)

    def _each(
        self,
        op: OpBuilder,
        logp: ir.Value,
        labels: ir.Value,
        input_lengths: ir.Value,
        target_lengths: ir.Value,
    ) -> ir.Value:
        log_zero, zero = op.const(_LOG_ZERO, logp.dtype), op.const(0.0, logp.dtype)
        extended, skip = self._extended(op, labels, target_lengths)
        # [N, L] -> [T, N, L]: the log-probability of every extended label at every time
        times = op.size(logp, 0)
        batch, length = op.size(extended, 0), op.size(extended, 1)
        index = op.Expand(op.Unsqueeze(extended, [0]), op.vector([times, batch, length]))
        emitted = op.GatherElements(logp, index, axis=2)
        running = op.Less(op.Unsqueeze(op.iota(times), [1]), input_lengths)  # [T, N]
        # Before the first step, all probability is at e_0.
        position = op.iota(length)
        start = op.Where(op.Equal(position, 0), zero, log_zero)
        start = op.Expand(start, op.vector([batch, length]))
        blocked = op.Where(skip, zero, log_zero)
        last = self._scan(op, start, emitted, op.Unsqueeze(running, [2]), blocked)

        end = op.Unsqueeze(op.Mul(target_lengths, 2), [1])
        final = op.Or(op.Equal(position, end), op.Equal(position, op.Sub(end, 1)))
        return op.Neg(op.ReduceLogSumExp(op.Where(final, last, log_zero), [1], keepdims=0))

    def _extended(
        self, op: OpBuilder, labels: ir.Value, target_lengths: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Return ``e`` [N, 2 S + 1] and whether a path may skip from ``e_(s-2)`` to ``e_s``."""
        blank = op.const(self.blank)
        # The runtime refuses these, as it refuses labels beyond the classes.
        labels = in_range_labels(op, op.Where(op.Equal(labels, blank), op.const(-1), labels))
        inside = op.Less(op.iota(op.size(labels, 1)), op.Unsqueeze(target_lengths, [1]))
        labels = op.Where(inside, labels, blank)
        # [N, S] -> [N, S, 2] -> [N, 2 S]: a blank before each label, one after the last
        pairs = op.Pad(op.Unsqueeze(labels, [2]), [0, 0, 1, 0, 0, 0], blank)
        flat = op.reshape(pairs, [op.size(labels, 0), -1])
        extended = op.Pad(flat, [0, 0, 0, 1], blank)
        before = op.Slice(op.Pad(extended, [0, 2, 0, 0], blank), [0], [-2], [1])
        new = op.Not(op.Equal(extended, before))
        return extended, op.And(new, op.Not(op.Equal(extended, blank)))

    def _scan(
        self,
        op: OpBuilder,
        start: ir.Value,
        emitted: ir.Value,
        running: ir.Value,
        blocked: ir.Value,
    ) -> ir.Value:
        step = op.body([start, *(_at_one_time(v) for v in (emitted, running))])
        alpha, log_probability, active = step.graph.inputs
        padded = step.Pad(alpha, [0, 2, 0, 0], op.const(_LOG_ZERO, start.dtype))
        one = step.Slice(padded, [1], [-1], [1])
        two = step.Add(step.Slice(padded, [0], [-2], [1]), blocked)
        paths = step.Concat(*(step.Unsqueeze(v, [2]) for v in (alpha, one, two)), axis=2)
        reached = step.Add(step.ReduceLogSumExp(paths, [2], keepdims=0), log_probability)
        # Without the floor, log_zero would decrease at each step until it overflows.
        floor = op.const(_LOG_ZERO, start.dtype)
        reached = step.Where(step.Less(reached, floor), floor, reached)
        step.graph.outputs.append(step.Where(active, reached, alpha))
        step.graph.outputs[0].shape = start.shape
        last = op.Scan(start, emitted, running, body=step.graph, num_scan_inputs=2)
        last.shape = start.shape
        return last


def _at_one_time(x: ir.Value) -> ir.Value:
    """Return a value that has the type of ``x`` without its first axis."""
    slice_ = ir.Value(name=x.name, type=x.type)
    S.set_dims(slice_, (S.dims_of(x) or ())[1:])
    return slice_
