"""Add a loss and metrics to a model.

:func:`attach_loss` does it in four steps, which are the parts of this file in order:
:func:`resolve` turns everything that can be a loss into :class:`LossTerm` objects;
:class:`LossContext` finds the outputs that a loss reads and adds the inputs for its targets;
:func:`build_metrics` emits the metrics, each with the output and target of a loss;
:class:`_LossBuilder` emits the terms, and their weighted sum becomes the output ``loss``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError, by_caller
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, python_operators
from onnxtrain.importer import mark_constants
from onnxtrain.losses.classification import BCE, CrossEntropy
from onnxtrain.losses.distillation import Distillation
from onnxtrain.losses.from_model import insert_model
from onnxtrain.losses.logits import Reads, find_logits
from onnxtrain.losses.loss import FLOAT, INT64, LOSSES, Loss, TargetSpec, reduce
from onnxtrain.losses.metrics import Metric, metric_by_name
from onnxtrain.registry import parse_options, unknown_name_error
from onnxtrain.targets import Target


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A loss on certain outputs, as a term of a weighted sum.

    Args:
        loss: any loss except a list.
        output: the output or inner value of the model that the loss reads; several names for a
            loss with several predictions (anchor, positive, negative). By default the only float
            output.
        weight: factor of this term.
        target: names for the inputs that the loss adds. The name of an existing input, or of a
            target of another term, reuses that input: an autoencoder's target is its own input.
        reduce: ``"mean"`` or ``"sum"``, for a loss that returns one value per element.
    """

    loss: Any
    output: str | Sequence[str] | None = None
    weight: float = 1.0
    target: str | Sequence[str] | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        if self.reduce not in (None, "mean", "sum"):
            raise PrepareError(f"reduce must be 'mean' or 'sum': {self.reduce!r}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names in ``output``."""
        return _names(self.output)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in ``target``."""
        return _names(self.target)


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


LossLike = (
    str
    | os.PathLike[str]
    | bytes
    | onnx.ModelProto
    | ir.Model
    | Loss
    | type[Loss]
    | Callable[..., Any]
    | LossTerm
    | Sequence[Any]
)
"""A registered name, a loss object, the name of an output, a function, a module or function of
torch, a model, or a list."""


@dataclasses.dataclass(frozen=True)
class Existing:
    """A scalar output of the model that is the loss."""

    value: ir.Value


@dataclasses.dataclass(frozen=True)
class FromModel:
    """A loss that another model computes."""

    source: Any


def resolve(loss: LossLike, model: ir.Model | None = None) -> tuple[LossTerm, ...]:
    """Return the terms of a loss; the loss of each is a Loss, Existing, FromModel or function.

    >>> resolve("mse")[0].loss
    MSE(reduction='mean')
    >>> resolve("cross_entropy:label_smoothing=0.1,axis=-1")[0].loss.label_smoothing
    0.1
    """
    if isinstance(loss, list | tuple):
        if not loss:
            raise PrepareError("the list of losses is empty\nhint: give at least one")
        return tuple(term for item in loss for term in resolve(item, model))
    term = loss if isinstance(loss, LossTerm) else LossTerm(loss)
    if isinstance(term.loss, list | tuple | LossTerm):
        raise PrepareError("a LossTerm holds one loss\nhint: give a list of LossTerm instead")
    return (dataclasses.replace(term, loss=_kind(term.loss, model)),)


def loss_inputs(loss: LossLike, model: ir.Model) -> frozenset[str]:
    """Return the names of all outputs and inner values that a loss is given by name."""
    return frozenset(name for term in resolve(loss, model) for name in term.outputs)


def _kind(loss: Any, model: ir.Model | None) -> Any:
    if isinstance(loss, Loss | Existing | FromModel):
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss()
    if isinstance(loss, str) and not loss.endswith(".onnx"):
        return _by_name(loss, model)
    if isinstance(loss, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        return FromModel(loss)
    if _is_of_torch(loss):
        # Who passes it has torch; this package must not import it.
        return importlib.import_module("onnxtrain.torch").from_torch_loss(loss)
    if callable(loss):
        return loss
    raise PrepareError(
        f"not a loss: {type(loss).__name__}\n"
        "hint: give a name, a loss object, a function over the builder, or a model"
    )


def _is_of_torch(loss: Any) -> bool:
    """Return whether a loss is a module or function of torch, or a function that uses torch."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    code = getattr(loss, "__code__", None)
    if code is not None and code.co_varnames[:1] == ("op",):
        return False
    read = [] if code is None else [loss.__globals__.get(n) for n in code.co_names]
    annotations = getattr(loss, "__annotations__", {}).values()
    used = [loss, *type(loss).__mro__, *annotations, *read]
    return any(_package_of(x) == "torch" for x in used) or any(
        isinstance(a, str) and a.rpartition(".")[2] == "Tensor" for a in annotations
    )


def _package_of(x: Any) -> str:
    name = x.__name__ if inspect.ismodule(x) else getattr(x, "__module__", "")
    return str(name).partition(".")[0]


def _by_name(name: str, model: ir.Model | None) -> Any:
    outputs = {} if model is None else {y.name or "": y for y in model.graph.outputs}
    if name in outputs:  # an output of the model takes precedence over a registered loss
        return Existing(outputs[name])
    if LOSSES.find(parse_options(name)[0]) is not None:
        return LOSSES.make(name)
    raise unknown_name_error(name, [*LOSSES, *outputs], "loss or output")


_LOGITS = "logits"  # the default output of a loss if the model has several
_HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def label_type(op: OpBuilder) -> ir.DataType:
    """Return the type of class labels: int32 for targets without int64."""
    return ir.DataType.INT32 if op.target.lacks("int64") else INT64


class LossContext:
    """A model that a loss is being added to; ``own`` are the outputs it had before."""

    def __init__(self, model: ir.Model, op: OpBuilder) -> None:
        self.model, self.graph, self.op = model, model.graph, op
        self.own = list(model.graph.outputs)
        self.repairs: list[str] = []
        self._casts: dict[ir.Value, ir.Value] = {}

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs of the graph by name, including added ones."""
        return {x.name or "": x for x in self.graph.inputs}

    def upcast(self, x: ir.Value) -> ir.Value:
        """Return a prediction, cast to float32 if it is in half precision."""
        if x.dtype not in _HALF_TYPES:
            return x
        if x not in self._casts:
            self._casts[x] = self.op.cast(x, FLOAT)
        return self._casts[x]

    def predictions(self, loss: Loss, names: Sequence[str]) -> list[ir.Value]:
        """Return the outputs that a loss reads."""
        floats = [y for y in self.own if S.is_float(y)]
        floats = [y for y in floats if not _is_stored(y)] or floats
        scores = [y for y in floats if y.name == _LOGITS]
        if names:
            floats = [self.find(name) for name in names]
        elif loss.predictions == 1 and scores:
            floats = scores  # the other outputs are hidden states, attentions and the like
        elif len(floats) not in (1, loss.predictions):
            listing = ", ".join(y.name or "" for y in self.own)
            name = floats[0].name if floats else "logits"
            raise PrepareError(
                f"{type(loss).__name__}: the model has several outputs: {listing}\n"
                "hint: select one, for example "
                + by_caller(
                    f"LossTerm({type(loss).__name__}(), output={name!r})", f"--loss-output {name}"
                )
            )
        wrong = [x for x in floats if not S.is_float(x)]
        if wrong:
            raise PrepareError(f"a loss needs a float output, got {S.describe_value(wrong[0])}")
        return floats

    def scores(self, loss: Loss, y: ir.Value) -> ir.Value:
        """Return what a loss reads of an output: the logits if the output is their Softmax."""
        axis = loss.normalized_axis(y)
        label = type(loss).__name__
        name = next((n for n in LOSSES if LOSSES[n] is type(loss)), label)
        found = find_logits(self.op, label, name, loss.reads, y, axis)
        if found is None:
            return y
        self.repairs.append(found.repair)
        return found.value

    def find(self, name: str) -> ir.Value:
        """Return an output or an inner value by name."""
        for y in self.own:
            if y.name == name:
                return y
        inner = {y.name or "": y for node in self.graph for y in node.outputs}
        if name not in inner:
            outputs = [y.name or "" for y in self.own]
            near = difflib.get_close_matches(name, [*outputs, *inner], n=3, cutoff=0.5)
            known = dict.fromkeys([*near, *outputs])
            raise PrepareError(f"unknown output: {name!r}\nhint: the model has {', '.join(known)}")
        return inner[name]

    def new_input(self, name: str, target: TargetSpec) -> ir.Value:
        """Add an input for a target."""
        dtype = label_type(self.op) if target.dtype == INT64 else target.dtype
        return self.op.input(name, dtype, target.dims)

    def shared_input(self, name: str, target: TargetSpec, loss: Loss) -> ir.Value:
        """Return the input of a name, and add it if the model does not have it."""
        if name not in self.inputs:
            if name in self.op.names.taken:
                raise PrepareError(
                    f"the model already has a value named {name!r}\nhint: rename one of them"
                )
            return self.new_input(name, target)
        value = self.inputs[name]
        if S.is_float(value) and target.dtype == INT64 and not isinstance(loss, CrossEntropy):
            raise PrepareError(
                f"{type(loss).__name__} expects class indices, got {S.describe_value(value)}"
            )
        if target.dtype != INT64:
            return self.op.cast(value, target.dtype)
        integers = (INT64, ir.DataType.INT32)
        return value if value.dtype in integers or S.is_float(value) else self.op.cast(value, INT64)

    def named(self, value: ir.Value, name: str, replaced: Collection[ir.Value] = ()) -> ir.Value:
        """Return the value under a name; an inner value that has the name is renamed."""
        if value.name == name:
            return value
        outside = {*self.graph.inputs, *self.graph.initializers.values(), *self.own} - {*replaced}
        for other in outside:
            if other.name == name:
                raise PrepareError(
                    f"the model already uses the name {name!r}: {S.describe_value(other)}\n"
                    f"hint: rename it in the model, or pass loss={name!r} if it is the loss"
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
        """Call ``function(op, *outputs)``, with outputs by parameter name or in order."""
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
            signature = ", ".join(p.name for p in parameters)
            raise PrepareError(
                f"the loss function takes ({signature}), but the model has {', '.join(outputs)}\n"
                "hint: name its parameters after outputs, or use LossTerm(function, output=[...])"
            )
        if not isinstance(value, ir.Value):
            raise PrepareError(
                f"the loss function returned {type(value).__name__}\n"
                "hint: it must return a value of the builder, for example op.ReduceMean(...)"
            )
        return value


def _is_stored(y: ir.Value) -> bool:
    """Return whether an output is an initializer of the file, for example a version number."""
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
    """The output of the model; the prediction is its logits, or its cast to float32."""
    targets: Sequence[ir.Value] = ()
    others: Sequence[ir.Value] = ()
    """Further predictions, of a loss that reads several outputs."""
    repaired: bool = False
    """Whether the prediction is the logits before the source's Softmax or Sigmoid."""


def build_metrics(
    scope: LossContext, metrics: Sequence[MetricLike], terms: Sequence[Term]
) -> dict[str, ir.Value]:
    """Emit the metrics; return them by name."""
    values: dict[str, ir.Value] = {}
    for metric in metrics:
        name, value = _build(scope, metric, terms)
        if name in values or name == "loss":
            raise PrepareError(f"two metrics are named {name!r}\nhint: pass name= to one of them")
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
    if term is not None and metric.reads_scores:
        prediction = term.prediction
    elif metric.output or term is None:
        found = scope.find(metric.output) if metric.output else _only_output(scope, metric)
        prediction = scope.upcast(found)
    else:
        prediction = term.source and scope.upcast(term.source)
    if metric.target is not None:
        if scope.inputs.get(metric.target) is None:
            raise PrepareError(
                f"unknown input: {metric.target!r}\nhint: use one of {', '.join(scope.inputs)}"
            )
        targets: Sequence[ir.Value] = [scope.inputs[metric.target]]
    elif term is not None:
        targets = term.targets
    else:
        raise PrepareError(
            f"metric {metric.label!r} has no target to compare with\n"
            f"hint: name one, for example {type(metric).__name__}(target='labels')"
        )
    if metric.reads_all and term is not None:
        targets = [*term.others, *targets]
    elif len(targets) != 1:
        raise PrepareError(
            f"metric {metric.label!r} needs one target, but the loss has "
            f"{', '.join(t.name or '' for t in targets)}\nhint: pass target= to the metric"
        )
    assert prediction is not None
    return metric.label, metric.beside(term.loss if term else None).build(
        scope.op, prediction, *targets
    )


def _term_of(metric: Metric, terms: Sequence[Term]) -> Term | None:
    """Return the term whose prediction and target a metric uses."""
    candidates = [t for t in terms if t.loss is not None]
    # Beside a teacher, metrics compare with the labels.
    candidates = [t for t in candidates if not isinstance(t.loss, Distillation)] or candidates
    if metric.output is not None:
        candidates = [t for t in candidates if t.source and t.source.name == metric.output]
    if len(candidates) > 1:
        listing = ", ".join(t.source.name or "" for t in candidates if t.source)
        raise PrepareError(
            f"metric {metric.label!r}: the losses read several outputs: {listing}\n"
            f"hint: select one: {type(metric).__name__}(output=..., target=...)"
        )
    return candidates[0] if candidates else None


def _only_output(scope: LossContext, metric: Metric) -> ir.Value:
    floats = [y for y in scope.own if S.is_float(y) and S.dims_of(y) not in ((), (1,))]
    if len(floats) != 1:
        raise PrepareError(
            f"metric {metric.label!r}: the model has several outputs: "
            f"{', '.join(y.name or '' for y in scope.own)}\n"
            f"hint: select one: {type(metric).__name__}(output=...)"
        )
    return floats[0]


@dataclasses.dataclass(frozen=True)
class Compared:
    """An output that a loss compares with a target."""

    output: str
    activation: str
    """What makes probabilities: ``"softmax"``, ``"sigmoid"`` or ``"exp"``; empty for losses of
    other values."""
    applied: bool
    """Whether the output has it already."""


_ACTIVATIONS = {
    Reads.SOFTMAX_LOGITS: "softmax",
    Reads.SIGMOID_LOGITS: "sigmoid",
    Reads.LOG_PROBABILITIES: "exp",
}


def _compared(work: LossContext, terms: Sequence[Term]) -> dict[str, Compared]:
    """Return the output that each target is compared with, if the model returns it."""
    pairs: dict[str, Compared] = {}
    for term in terms:
        y = term.source
        if term.loss is None or y is None or y not in work.own or len(term.targets) != 1:
            continue
        probabilities = isinstance(term.loss, BCE)
        activation = "sigmoid" if probabilities else _ACTIVATIONS.get(term.loss.reads, "")
        pair = Compared(y.name or "", activation, term.repaired or probabilities)
        pairs[term.targets[0].name or ""] = pair
    return pairs


@dataclasses.dataclass(frozen=True)
class Attached:
    """A model with a loss, and the values that were added."""

    model: ir.Model
    loss: ir.Value
    """A scalar named ``loss``, the first output of the model."""
    targets: list[ir.Value]
    """The added inputs, in order."""
    metrics: dict[str, ir.Value]
    """Scalars, the outputs after the loss."""
    outputs: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    """The values named by ``outputs=``."""
    repairs: tuple[str, ...] = ()
    """What the losses read instead of outputs of the model, a line each."""
    compared: dict[str, Compared] = dataclasses.field(default_factory=dict)
    """By target: the output that a loss compares with it."""


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

    The outputs of the graph become the loss, the metrics, then its previous outputs. Predictions in
    half precision are compared in float32. Initializers that the loss adds are constants, never
    parameters.

    Args:
        model: a model in the normal form.
        loss: a name (``"cross_entropy"``, ``"mse"``), a loss object, the name of a scalar output, a
            function ``(op, *outputs) -> value``, a module or function of torch, another ONNX model,
            or a list of :class:`LossTerm`, which are summed.
        metrics: names, objects, or functions as above.
        outputs: names of other values of the model to return in :attr:`Attached.outputs`.
        target: runtime to generate operators for.
        differentiated: whether the caller will differentiate the loss.

    Raises:
        PrepareError: a name does not exist, or several outputs match.
        ShapeError: a prediction has the wrong layout for the loss, or the loss is not a scalar.
    """
    known = set(model.graph.initializers)
    before = list(model.graph.inputs)
    work = _LossBuilder(model, OpBuilder(model.graph, prefix="loss/", target=target))
    work.op.differentiated = differentiated
    with python_operators(work.op):
        terms = work.build_terms(resolve(loss, model))
    total = _sum(work.op, terms)
    kept = [y for y in work.own if not _is_loss_output(y, total)]
    value = work.named(total, "loss", [y for y in work.own if y not in kept])
    with python_operators(work.op):
        metric_values = build_metrics(work, list(metrics), terms)
    extra = {name: work.find(name) for name in outputs}
    mark_constants(model, set(model.graph.initializers) - known)
    model.graph.outputs.clear()
    model.graph.outputs.extend(
        [value, *metric_values.values(), *(y for y in kept if y not in metric_values.values())]
    )
    targets = [x for x in model.graph.inputs if x not in before]
    repairs, compared = tuple(work.repairs), _compared(work, terms)
    return Attached(model, value, targets, metric_values, extra, repairs, compared)


def _is_loss_output(y: ir.Value, loss: ir.Value) -> bool:
    """Return whether an output named ``loss`` is the loss itself, possibly of shape [1]."""
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
        """Emit all terms; targets with the same default name are numbered."""
        plans: list[tuple[LossTerm, list[ir.Value], list[TargetSpec]]] = []
        for term in terms:
            if isinstance(term.loss, Loss):
                sources = self.predictions(term.loss, term.outputs)
                specs = term.loss.targets(self.upcast(sources[0]))
                plans.append((term, sources, specs[len(sources) - 1 :]))
        counts = Counter(
            t.name for term, _, specs in plans for t in specs[len(term.target_names) :]
        )
        used: Counter[str] = Counter()
        built: list[Term] = []
        pending = iter(plans)
        for term in terms:
            if isinstance(term.loss, Loss):
                _, sources, specs = next(pending)
                built.append(self.build_loss(term, sources, specs, counts, used))
            else:
                built.append(Term(term, self.scalar(term, self.build_other(term))))
        return built

    def build_loss(
        self,
        term: LossTerm,
        sources: list[ir.Value],
        specs: list[TargetSpec],
        counts: Counter[str],
        used: Counter[str],
    ) -> Term:
        loss: Loss = term.loss
        scores = [self.scores(loss, x) for x in sources]
        predictions = [self.upcast(x) for x in scores]
        names = term.target_names
        if len(names) > len(specs):
            raise PrepareError(
                f"{type(loss).__name__} takes {len(specs)} target(s), got {', '.join(names)}"
            )
        targets = []
        for i, spec in enumerate(specs):
            if i < len(names):
                targets.append(self.shared_input(names[i], spec, loss))
                continue
            name = spec.name
            if counts[name] > 1:
                used[name] += 1
                name = f"{name}_{used[name]}"
            targets.append(self.new_input(name, spec))
        value = loss.build(self.op, *predictions, *targets)
        value = self.scalar(term, value)
        repaired = scores[0] is not sources[0]
        return Term(
            term, value, loss, predictions[0], sources[0], targets, predictions[1:], repaired
        )

    def build_other(self, term: LossTerm) -> ir.Value:
        if term.target_names:
            raise PrepareError(
                f"target={', '.join(term.target_names)}: only a loss object has targets to name\n"
                "hint: a loss function names its inputs: op.input(name, dtype, dims)"
            )
        if isinstance(term.loss, Existing):
            if term.outputs:
                raise PrepareError(
                    f"loss={term.loss.value.name!r} is an output of the model and takes no output="
                )
            return term.loss.value
        if isinstance(term.loss, FromModel):
            chosen = [self.find(name) for name in term.outputs]
            return insert_model(self.model, self.op, term.loss.source, self.own, chosen)
        return self.call(term.loss, term.outputs)

    def scalar(self, term: LossTerm, value: ir.Value) -> ir.Value:
        """Return a loss with shape []; raise ShapeError for a tensor without ``reduce=``."""
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
