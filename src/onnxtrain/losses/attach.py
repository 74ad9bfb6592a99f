"""A model with a loss: the inputs and values that a loss, and metrics beside it, add.

Everything that can be a loss, brought to a few kinds.

The values of a model that losses and metrics look at, and the inputs they add.

Metrics beside a loss: which output and target they share with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.importer import mark_constants
from onnxtrain.losses.classification import CrossEntropy
from onnxtrain.losses.from_model import insert_model
from onnxtrain.losses.loss import FLOAT, INT64, LOSSES, Loss, TargetSpec, reduce
from onnxtrain.losses.metrics import Metric, metric_by_name
from onnxtrain.registry import parse_options, unknown_name_error
from onnxtrain.targets import Target


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A loss on certain outputs, as a term of a sum.

    Args:
        loss: anything that is a loss, except a list.
        output: which output or inner value of the model it looks at; several names for a loss with
            several predictions (anchor, positive, negative). The only float output unless given.
        weight: the factor of this term.
        target: names for the inputs that the loss adds. A name that the model's inputs or another
            term have stands for that input: an autoencoder's target is its own input.
        reduce: ``"mean"`` or ``"sum"`` of a loss that gives one number per element.
    """

    loss: Any
    output: str | Sequence[str] | None = None
    weight: float = 1.0
    target: str | Sequence[str] | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        if self.reduce not in (None, "mean", "sum"):
            raise PrepareError(f"reduce is 'mean' or 'sum', not {self.reduce!r}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names in ``output``."""
        return _names(self.output)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in ``target``."""
        return _names(self.target)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


LossLike = (
    str
    | os.PathLike[str]
    | bytes
    | onnx.ModelProto
    | ir.Model
    | Loss
    | type[Loss]
    | Callable[..., ir.Value]
    | LossTerm
    | Sequence[Any]
)
"""A name, a loss object, an output's name, a function over the builder, a model, or a list."""


@dataclasses.dataclass(frozen=True)
class Existing:
    """A scalar that the model computes already."""

    value: ir.Value


@dataclasses.dataclass(frozen=True)
class FromModel:
    """A loss that another model computes."""

    source: Any


def resolve(loss: LossLike, model: ir.Model | None = None) -> tuple[LossTerm, ...]:
    """Return the terms of a loss, each with a Loss, Existing, FromModel or function in it.

    >>> resolve("mse")[0].loss
    MSE(reduction='mean')
    >>> resolve("cross_entropy:label_smoothing=0.1,axis=-1")[0].loss.label_smoothing
    0.1
    """
    if isinstance(loss, list | tuple):
        if not loss:
            raise PrepareError("the list of losses is empty\nhint: give at least one")
        return tuple(term for one in loss for term in resolve(one, model))
    term = loss if isinstance(loss, LossTerm) else LossTerm(loss)
    if isinstance(term.loss, list | tuple | LossTerm):
        raise PrepareError("a LossTerm holds one loss\nhint: give a list of LossTerm instead")
    return (dataclasses.replace(term, loss=_kind(term.loss, model)),)


def loss_inputs(loss: LossLike, model: ir.Model) -> frozenset[str]:
    """Return the names of outputs and inner values that the terms of a loss name."""
    return frozenset(name for term in resolve(loss, model) for name in term.outputs)


def _kind(loss: Any, model: ir.Model | None) -> Any:
    if isinstance(loss, Loss | Existing | FromModel):
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss()
    if isinstance(loss, str) and not loss.endswith(".onnx"):
        return _named(loss, model)
    if isinstance(loss, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        return FromModel(loss)
    if callable(loss):
        return loss
    raise PrepareError(
        f"not a loss: {type(loss).__name__}\n"
        "hint: give a name, a loss object, a function over the builder, or a model"
    )


def _named(name: str, model: ir.Model | None) -> Any:
    outputs = {} if model is None else {y.name or "": y for y in model.graph.outputs}
    if name in outputs:  # the model's own word for it wins over ours
        return Existing(outputs[name])
    if LOSSES.find(parse_options(name)[0]) is not None:
        return LOSSES.make(name)
    raise unknown_name_error(name, [*LOSSES, *outputs], "loss or output")


_LOGITS = "logits"  # what a loss looks at where a model has several outputs and nothing was said
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def label_type(op: OpBuilder) -> ir.DataType:
    """Return the type of class labels: int32 where a runtime lacks int64."""
    return ir.DataType.INT32 if op.target.lacks("int64") else INT64


class LossContext:
    """A model to which something is being attached; ``own`` are its own outputs."""

    def __init__(self, model: ir.Model, op: OpBuilder) -> None:
        self.model, self.graph, self.op = model, model.graph, op
        self.own = list(model.graph.outputs)
        self._wide: dict[ir.Value, ir.Value] = {}

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs of the graph by name, those that were added included."""
        return {x.name or "": x for x in self.graph.inputs}

    def wide(self, x: ir.Value) -> ir.Value:
        """Return a prediction in float32 if it is in half precision."""
        if x.dtype not in _NARROW:
            return x
        if x not in self._wide:
            self._wide[x] = self.op.cast(x, FLOAT)
        return self._wide[x]

    def predictions(self, loss: Loss, names: Sequence[str]) -> list[ir.Value]:
        """Return the outputs that a loss looks at."""
        floats = [y for y in self.own if S.is_float(y)]
        floats = [y for y in floats if not _is_stored(y)] or floats
        scores = [y for y in floats if y.name == _LOGITS]
        if names:
            floats = [self.find(name) for name in names]
        elif loss.predictions == 1 and scores:
            floats = scores  # beside hidden states, attentions and the like
        elif len(floats) not in (1, loss.predictions):
            listing = ", ".join(y.name or "" for y in self.own)
            name = floats[0].name if floats else "logits"
            raise PrepareError(
                f"which output does {type(loss).__name__} look at? the model has {listing}\n"
                f"hint: LossTerm({type(loss).__name__}(), output={name!r}), say"
            )
        wrong = [x for x in floats if not S.is_float(x)]
        if wrong:
            raise PrepareError(f"a loss looks at floats, not at {S.describe_value(wrong[0])}")
        return floats

    def find(self, name: str) -> ir.Value:
        """Return an output or an inner value by name."""
        for y in self.own:
            if y.name == name:
                return y
        inner = {y.name or "": y for node in self.graph for y in node.outputs}
        if name not in inner:
            outputs = [y.name or "" for y in self.own]
            near = difflib.get_close_matches(name, [*outputs, *inner], n=3, cutoff=0.5)
            raise PrepareError(
                f"no such output: {name!r}\nhint: the model has {', '.join(near or outputs)}"
            )
        return inner[name]

    def new_input(self, name: str, target: TargetSpec) -> ir.Value:
        """Add an input; class labels are int32 where a runtime lacks int64."""
        dtype = label_type(self.op) if target.dtype == INT64 else target.dtype
        return self.op.input(name, dtype, target.dims)

    def shared_input(self, name: str, target: TargetSpec, loss: Loss) -> ir.Value:
        """Return the input of that name, whether it is there already or not."""
        if name not in self.inputs:
            if name in self.op.names.taken:
                raise PrepareError(f"{name!r} is taken by a value of the model\nhint: rename it")
            return self.new_input(name, target)
        value = self.inputs[name]
        if S.is_float(value) and target.dtype == INT64 and not isinstance(loss, CrossEntropy):
            raise PrepareError(
                f"{type(loss).__name__} wants class indices, not {S.describe_value(value)}"
            )
        if target.dtype != INT64:
            return self.op.cast(value, target.dtype)
        integers = (INT64, ir.DataType.INT32)
        return value if value.dtype in integers or S.is_float(value) else self.op.cast(value, INT64)

    def named(self, value: ir.Value, name: str, replaced: Collection[ir.Value] = ()) -> ir.Value:
        """Return a value under a name of its own, clearing the name of what nobody sees."""
        if value.name == name:
            return value
        outside = {*self.graph.inputs, *self.graph.initializers.values(), *self.own} - {*replaced}
        for other in outside:
            if other.name == name:
                raise PrepareError(
                    f"the name {name!r} is taken by {S.describe_value(other)}\n"
                    f"hint: rename it in the model, or pass it as loss={name!r} if it is the loss"
                )
        for node in self.graph.all_nodes():
            for y in node.outputs:
                if y.name == name:
                    y.name = self.op.names.fresh(name)
        if value in outside or value.producer() is None:
            value = self.op.Identity(value)
        value.name = name
        self.op.names.taken.add(name)
        return value

    def call(self, function: Callable[..., Any], names: Sequence[str]) -> ir.Value:
        """Call a function over the builder with outputs, by name or in order."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        outputs = {y.name or "": y for y in self.own}
        if names:
            value = function(self.op, *(self.find(name) for name in names))
        elif any(p.kind == p.VAR_POSITIONAL for p in parameters):
            value = function(self.op, *self.own)
        elif all(p.name in outputs for p in parameters if p.default is p.empty):
            value = function(
                self.op, **{p.name: outputs[p.name] for p in parameters if p.name in outputs}
            )
        elif sum(p.default is p.empty for p in parameters) == len(self.own):
            value = function(self.op, *self.own)
        else:
            takes = ", ".join(p.name for p in parameters)
            raise PrepareError(
                f"the loss function takes ({takes}), but the model has {', '.join(outputs)}\n"
                "hint: name its parameters after outputs, or use LossTerm(function, output=[...])"
            )
        if not isinstance(value, ir.Value):
            raise PrepareError(
                f"the loss function gave {type(value).__name__}\n"
                "hint: it must return a value that it made with the builder"
            )
        return value


def _is_stored(y: ir.Value) -> bool:
    """Return whether an output is a tensor of the file as it is: a version number, say."""
    producer = y.producer()
    while producer is not None and producer.op_type == "Identity":
        (x,) = producer.inputs
        assert x is not None
        y, producer = x, x.producer()
    return y.is_initializer()


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
    work = _LossBuilder(model, OpBuilder(model.graph, prefix="loss/", target=target))
    work.op.differentiated = differentiated
    terms = work.build_terms(resolve(loss, model))
    total = _sum(work.op, terms)
    kept = [y for y in work.own if not _is_loss_output(y, total)]
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


def _is_loss_output(y: ir.Value, loss: ir.Value) -> bool:
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


class _LossBuilder(LossContext):
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
