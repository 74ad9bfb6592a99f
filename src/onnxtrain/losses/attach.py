"""A model with a loss: the inputs and values that a loss, and metrics beside it, add."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare import mark_constants
from onnxtrain.losses.base import Loss, TargetSpec, reduce
from onnxtrain.losses.context import LossContext
from onnxtrain.losses.from_model import insert_model
from onnxtrain.losses.metric_terms import MetricLike, Term, build_metrics
from onnxtrain.losses.terms import Existing, FromModel, LossLike, LossTerm, resolve
from onnxtrain.targets import Target


@dataclasses.dataclass(frozen=True)
class Attached:
    """A model with a loss, and the names of what was added."""

    model: ir.Model
    loss: ir.Value
    """A scalar called ``loss``, the first output of the model."""
    targets: list[ir.Value]
    """The inputs that were added, in order."""
    metrics: dict[str, ir.Value]
    """Scalars, the outputs after the loss."""
    outputs: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    """The values asked for by ``outputs=``."""


def attach_loss(
    model: ir.Model,
    loss: LossLike,
    *,
    metrics: Iterable[MetricLike] = (),
    outputs: Iterable[str] = (),
    target: str | Target = "cpu",
    differentiated: bool = True,
) -> Attached:
    """Add a loss to a prepared model, in place.

    The graph's outputs become the loss, the metrics, then the model's own. Predictions in half
    precision are compared in float32. What the loss adds are constants, never parameters.

    Args:
        model: a model in the normal form.
        loss: a name (``"cross_entropy"``, ``"mse"``), a loss object, the name of a scalar output, a
            function ``(op, *outputs) -> value``, another ONNX model, or a list of
            :class:`LossTerm`, which are added up.
        metrics: names or objects, or functions as above.
        outputs: names of further values of the model that the caller wants to have at hand.
        target: the kind of runtime; where it lacks int64, class labels are int32.
        differentiated: whether the gradient of the loss will be asked for.

    Raises:
        PrepareError: a name does not exist, or it is not clear which output is meant.
        ShapeError: a prediction does not have the layout the loss wants, or the loss is no scalar.
    """
    known = set(model.graph.initializers)
    before = list(model.graph.inputs)
    work = _Attaching(model, OpBuilder(model.graph, prefix="loss/", target=target))
    work.op.differentiated = differentiated
    terms = work.build_terms(resolve(loss, model))
    total = _sum(work.op, terms)
    kept = [y for y in work.own if not _stands_for(y, total)]
    value = work.named(total, "loss", [y for y in work.own if y not in kept])
    metric_values = build_metrics(work, list(metrics), terms)
    extra = {name: work.find(name) for name in outputs}
    mark_constants(model, set(model.graph.initializers) - known)
    model.graph.outputs.clear()
    model.graph.outputs.extend(
        [value, *metric_values.values(), *(y for y in kept if y not in metric_values.values())]
    )
    targets = [x for x in model.graph.inputs if x not in before]
    return Attached(model, value, targets, metric_values, extra)


def _stands_for(y: ir.Value, loss: ir.Value) -> bool:
    """Return whether an output called loss is the loss itself, perhaps of shape [1]."""
    producer = loss.producer()
    reshaped = producer is not None and producer.op_type == "Reshape" and producer.inputs[0] is y
    return y.name == "loss" and (y is loss or reshaped)


def _sum(op: OpBuilder, terms: Sequence[Term]) -> ir.Value:
    total: ir.Value | None = None
    for term in terms:
        value, weight = term.value, term.weighted.weight
        value = value if weight == 1.0 else op.Mul(value, float(weight))
        total = value if total is None else op.Add(total, op.cast(value, total.dtype))
    assert total is not None
    return total


class _Attaching(LossContext):
    def build_terms(self, terms: Sequence[LossTerm]) -> list[Term]:
        """Emit all terms; the names of their targets are numbered if several want the same."""
        plans: list[tuple[LossTerm, list[ir.Value], list[TargetSpec]]] = []
        for term in terms:
            if isinstance(term.loss, Loss):
                sources = self.predictions(term.loss, term.outputs)
                wanted = term.loss.targets(self.wide(sources[0]))
                plans.append((term, sources, wanted[len(sources) - 1 :]))
        common = Counter(
            t.name for term, _, wanted in plans for t in wanted[len(term.target_names) :]
        )
        numbers: Counter[str] = Counter()
        built: list[Term] = []
        pending = iter(plans)
        for term in terms:
            if isinstance(term.loss, Loss):
                _, sources, wanted = next(pending)
                built.append(self.build_loss(term, sources, wanted, common, numbers))
            else:
                built.append(Term(term, self.scalar(term, self.build_other(term))))
        return built

    def build_loss(
        self,
        term: LossTerm,
        sources: list[ir.Value],
        wanted: list[TargetSpec],
        common: Counter[str],
        numbers: Counter[str],
    ) -> Term:
        loss: Loss = term.loss
        predictions = [self.wide(x) for x in sources]
        names = term.target_names
        if len(names) > len(wanted):
            raise PrepareError(
                f"{type(loss).__name__} takes {len(wanted)} target(s), got {', '.join(names)}"
            )
        targets = []
        for i, spec in enumerate(wanted):
            if i < len(names):
                targets.append(self.shared_input(names[i], spec, loss))
                continue
            name = spec.name
            if common[name] > 1:
                numbers[name] += 1
                name = f"{name}_{numbers[name]}"
            targets.append(self.new_input(name, spec))
        value = loss.build(self.op, *predictions, *targets)
        value = self.scalar(term, value)
        return Term(term, value, loss, predictions[0], sources[0], targets)

    def build_other(self, term: LossTerm) -> ir.Value:
        if term.target_names:
            raise PrepareError(
                f"target={', '.join(term.target_names)}: only loss objects have targets to name\n"
                "hint: a function names its inputs itself, op.input(name, dtype, dims)"
            )
        if isinstance(term.loss, Existing):
            if term.outputs:
                raise PrepareError(
                    f"{term.loss.value.name!r} is an output already; it does not look at others"
                )
            return term.loss.value
        if isinstance(term.loss, FromModel):
            chosen = [self.find(name) for name in term.outputs]
            return insert_model(self.model, self.op, term.loss.source, self.own, chosen)
        return self.call(term.loss, term.outputs)

    def scalar(self, term: LossTerm, value: ir.Value) -> ir.Value:
        """Return a loss in shape []; refuse what is not one number, unless it is to be reduced."""
        if not S.is_float(value):
            raise PrepareError(f"the loss is not a float: {S.describe_value(value)}")
        dims = S.dims_of(value)
        if dims == ():
            return value
        if dims == (1,):
            return self.op.Reshape(value, self.op.const([]))
        if term.reduce is None:
            raise ShapeError(
                f"the loss is not a scalar: {S.describe_value(value)}\n"
                "hint: use reduction='mean' or 'sum', or LossTerm(loss, reduce='mean')"
            )
        return reduce(self.op, value, term.reduce)
