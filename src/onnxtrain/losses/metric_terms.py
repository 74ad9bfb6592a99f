"""Metrics beside a loss: which output and target they share with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.losses.base import Loss
from onnxtrain.losses.context import LossContext
from onnxtrain.losses.metrics import Metric, metric_by_name
from onnxtrain.losses.terms import LossTerm

MetricLike = str | Metric | Callable[..., ir.Value]


@dataclasses.dataclass
class Term:
    """A loss that has been emitted."""

    weighted: LossTerm
    value: ir.Value
    loss: Loss | None = None
    prediction: ir.Value | None = None
    source: ir.Value | None = None
    """The model's own value that the prediction is."""
    targets: Sequence[ir.Value] = ()


def build_metrics(
    scope: LossContext, metrics: Sequence[MetricLike], terms: Sequence[Term]
) -> dict[str, ir.Value]:
    """Emit the metrics, by name."""
    values: dict[str, ir.Value] = {}
    for metric in metrics:
        name, value = _build(scope, metric, terms)
        if name in values or name == "loss":
            raise PrepareError(f"two metrics are called {name!r}\nhint: give one a name=")
        if S.dims_of(value) == (1,):
            value = scope.op.Reshape(value, scope.op.const([]))
        if S.dims_of(value) != ():
            raise ShapeError(f"the metric {name!r} is not a scalar: {S.describe_value(value)}")
        values[name] = value if value in scope.own else scope.named(value, name)
    return values


def _build(scope: LossContext, metric: MetricLike, terms: Sequence[Term]) -> tuple[str, ir.Value]:
    if isinstance(metric, str):
        for y in scope.own:
            if y.name == metric:
                return metric, y
        metric = metric_by_name(metric)
    if not isinstance(metric, Metric):
        if not callable(metric):
            raise PrepareError(f"not a metric: {type(metric).__name__}")
        return metric.__name__, scope.call(metric, ())
    term = _term_of(metric, terms)
    prediction = scope.wide(scope.find(metric.output)) if metric.output else None
    if prediction is None:
        prediction = _only_output(scope, metric) if term is None else term.prediction
    if metric.target is not None:
        if scope.inputs.get(metric.target) is None:
            raise PrepareError(
                f"no such input: {metric.target!r}\nhint: there is {', '.join(scope.inputs)}"
            )
        targets: Sequence[ir.Value] = [scope.inputs[metric.target]]
    elif term is not None:
        targets = term.targets
    else:
        raise PrepareError(
            f"what does {metric.label!r} compare with?\n"
            f"hint: {type(metric).__name__}(target='labels'), say"
        )
    if len(targets) != 1:
        raise PrepareError(
            f"{metric.label!r} compares with one target, but the loss has "
            f"{', '.join(t.name or '' for t in targets)}\nhint: give the metric a target="
        )
    assert prediction is not None
    return metric.label, metric.beside(term.loss if term else None).build(
        scope.op, prediction, *targets
    )


def _term_of(metric: Metric, terms: Sequence[Term]) -> Term | None:
    """Return the term whose prediction and target a metric shares."""
    candidates = [t for t in terms if t.loss is not None]
    if metric.output is not None:
        candidates = [t for t in candidates if t.source and t.source.name == metric.output]
    if len(candidates) > 1:
        listing = ", ".join(t.source.name or "" for t in candidates if t.source)
        raise PrepareError(
            f"which output does {metric.label!r} look at? the losses look at {listing}\n"
            f"hint: {type(metric).__name__}(output=..., target=...)"
        )
    return candidates[0] if candidates else None


def _only_output(scope: LossContext, metric: Metric) -> ir.Value:
    floats = [y for y in scope.own if S.is_float(y) and S.dims_of(y) not in ((), (1,))]
    if len(floats) != 1:
        raise PrepareError(
            f"which output does {metric.label!r} look at? "
            f"the model has {', '.join(y.name or '' for y in scope.own)}\n"
            f"hint: {type(metric).__name__}(output=...)"
        )
    return scope.wide(floats[0])
