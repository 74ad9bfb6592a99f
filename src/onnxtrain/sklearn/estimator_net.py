"""The net behind an estimator: where it comes from, and the sessions that train and run it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.build import candidates
from onnxtrain.autodiff.gradient_model import lift
from onnxtrain.autodiff.load_normalized import load_normalized
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import load
from onnxtrain.graph.modes import to_evaluation
from onnxtrain.graph.shapes.specialise import specialise
from onnxtrain.optim import Optimizer
from onnxtrain.runtime import session as runtime
from onnxtrain.sklearn.epoch_graph import Epoch, epoch_model
from onnxtrain.sklearn.objective import Penalty, objective
from onnxtrain.sklearn.pipeline import PREFIX, PRODUCER
from onnxtrain.sklearn.preprocessing_split import keep_output, open_source, split

_SMALL = 2e7  # floating-point operations of a step below which threads cost more than they give
_KEPT = 64  # sessions
_cache: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_lock = threading.Lock()


def cached(key: Any, make: Callable[[], Any]) -> Any:
    """Return what was made for a key before; sessions are shared by estimators of one kind."""
    if key is None:
        return make()
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    made = make()
    with _lock:
        _cache[key] = made
        while len(_cache) > _KEPT:
            _cache.popitem(last=False)
    return made


@dataclasses.dataclass(frozen=True)
class Net:
    """A model cut into pre-processing and trainable tail; it can be pickled."""

    key: tuple[Any, ...]
    """The same for nets that differ in nothing but the values of trained parameters."""
    full: bytes
    """The whole model, for inference."""
    before: bytes | None
    """Pre-processing, or nothing."""
    tail: bytes
    """From what pre-processing gives to raw predictions; the only model that is differentiated."""
    kind: str
    """What comes out: ``"values"``, ``"logits"`` or ``"probabilities"``."""
    columns: int
    rank: int
    parameters: tuple[str, ...]
    penalised: tuple[str, ...]
    """Those with two or more axes, which penalties look at."""
    buffers: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    """Name and numpy type of each input of the whole model."""
    features: tuple[tuple[str, str], ...]
    """Name and numpy type of each input of the tail."""
    chosen_by_user: bool

    def initial(self) -> dict[str, np.ndarray]:
        """Return parameters and buffers as they are in the model."""
        known = ir.from_proto(onnx.load_from_string(self.tail)).graph.initializers
        names = (*self.parameters, *self.buffers)
        return {n: np.array(_tensor(known[n]).numpy()) for n in names}

    @property
    def built(self) -> bool:
        """Whether it was built here, with a batch that may have any size."""
        return self.key[0] == "dense"

    def threads(self, given: int | None, rows: int, values: Mapping[str, np.ndarray]) -> int | None:
        """Return a number of threads: one for small nets, all cores for others."""
        if given is not None:
            return given
        work = 6.0 * rows * sum(values[n].size for n in self.parameters)
        return 1 if work < _SMALL else None

    def epoch(
        self,
        loss: Any,
        optimizer: Optimizer,
        penalty: Penalty | None,
        *,
        weighted: bool,
        device: str,
        threads: int | None,
        rows: int | None = None,
    ) -> tuple[Epoch, Any]:
        """Return the model of an epoch, of batches of ``rows`` rows if given, and a session."""

        def make() -> tuple[Epoch, Any]:
            function = objective(loss, weighted=weighted, penalty=penalty, weights=self.penalised)
            source = load(onnx.load_from_string(self.tail))
            base = load_normalized(source if rows is None else specialise(source, {"batch": rows}))
            epoch = epoch_model(
                base,
                function,
                optimizer,
                self.parameters,
                chosen_by_user=self.chosen_by_user,
                rows=rows,
            )
            data = epoch.model.SerializeToString()
            return epoch, runtime.create(data, device=device, threads=threads)

        settings = dataclasses.replace(optimizer, lr=1.0)  # the rate is an input
        named = None if callable(loss) else repr(loss)
        key = (self.key, named, repr(settings), penalty, weighted, device, threads, rows)
        return cached(None if named is None else ("epoch", *key), make)

    def run(
        self,
        values: Mapping[str, np.ndarray],
        feeds: dict[str, np.ndarray],
        *,
        device: str,
        threads: int | None,
    ) -> np.ndarray:
        """Return raw predictions for rows that pre-processing has seen."""

        def make() -> Any:
            model = ir.from_proto(onnx.load_from_string(self.tail))
            if model.opset_imports.get("", 0) >= 14:
                to_evaluation(model)
            names = (*self.parameters, *self.buffers)
            lift(model.graph, [model.graph.initializers[n] for n in names])
            proto = ir.to_proto(model)
            return runtime.create(proto.SerializeToString(), device=device, threads=threads)

        session = cached(("run", self.key, device, threads), make)
        weights = {n: values[n] for n in (*self.parameters, *self.buffers)}
        return runtime.run(session, None, {**feeds, **weights})[0]

    def preprocess(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the inputs of the tail."""
        if self.before is None:
            return feeds
        before = self.before
        session = cached(("before", self.key), lambda: runtime.create(before))
        names = [y.name for y in session.get_outputs()]
        wanted = {x.name for x in session.get_inputs()}
        arrays = runtime.run(session, names, {n: a for n, a in feeds.items() if n in wanted})
        return {
            **{n: a for n, a in feeds.items() if n in dict(self.features)},
            **dict(zip(names, arrays, strict=True)),
        }

    def trained(self, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        """Return the whole model with these values."""
        model = onnx.load_from_string(self.full)
        for tensor in model.graph.initializer:
            if tensor.name in values:
                array = np.ascontiguousarray(values[tensor.name])
                fresh = ir.to_proto(ir.Tensor(array, name=tensor.name))
                tensor.CopyFrom(fresh)
        return model


def net_of(
    model: Any,
    rows: Callable[[ir.Model], dict[str, np.ndarray]],
    *,
    classifier: bool,
    output: str | None,
    from_logits: bool | None,
    train: str | Sequence[str] | None,
    freeze: str | Sequence[str] | None,
    kind_key: tuple[Any, ...] | None = None,
) -> Net:
    """Cut a model at the right places.

    Args:
        model: whatever :func:`onnxtrain.load` takes.
        rows: gives a few rows of data for the model's inputs.
        classifier: whether probabilities are wanted; a Softmax or Sigmoid at the end is cut off.
        output: which output to train on; the first float output unless given.
        from_logits: whether that output is before the Softmax; ``None`` looks at the graph.
        train: names or globs of parameters.
        freeze: names or globs of parameters.
        kind_key: describes the net but for its parameters, if that is known.
    """
    whole = open_source(model)
    full = ir.to_proto(whole)
    graph = whole.graph
    inputs = tuple((x.name or "", _numpy(x)) for x in graph.inputs)
    value = _the_output(whole, output)
    kind = "values"
    if classifier:
        value, kind = _before_softmax(value, from_logits)
    keep_output(whole, value)
    given = ir.from_proto(ir.to_proto(whole))
    some = rows(given)
    frozen = [] if freeze is None else [freeze] if isinstance(freeze, str) else list(freeze)
    if given.producer_name == PRODUCER and train is None:
        train = [n for n in affine_weights(given.graph) if not n.startswith(PREFIX)] or None
    names = _parameters(given, train, frozen)
    parts = split(given, names, some)
    base = load_normalized(ir.to_proto(parts.tail))
    (raw,) = base.graph.outputs
    dims = S.dims_of(raw)
    if dims is None or len(dims) not in (1, 2) or (len(dims) == 2 and not isinstance(dims[1], int)):
        raise PrepareError(
            f"an estimator wants [batch] or [batch, columns], not {S.describe_value(raw)}\n"
            "hint: name another one in `output`, or give the model a fixed number of columns"
        )
    known = base.graph.initializers
    lost = [n for n in names if n not in known]
    names = [n for n in names if n in known]
    if not names:
        raise PrepareError(f"no parameter is left to train; unused: {', '.join(lost)}")
    tail = ir.to_proto(parts.tail).SerializeToString(deterministic=True)
    statistics = batch_statistics(base.graph)
    return Net(
        key=kind_key or (hashlib.sha256(tail).hexdigest(), tuple(names)),
        full=full.SerializeToString(deterministic=True),
        before=None if parts.before is None else parts.before.SerializeToString(),
        tail=tail,
        kind=kind,
        columns=int(dims[1]) if len(dims) == 2 else 1,  # pyright: ignore[reportArgumentType]
        rank=len(dims),
        parameters=tuple(names),
        penalised=tuple(n for n in names if _tensor(known[n]).numpy().ndim > 1),
        buffers=tuple(n for n, x in known.items() if x in statistics and n not in names),
        inputs=inputs,
        features=tuple((x.name or "", _numpy(x)) for x in parts.tail.graph.inputs),
        chosen_by_user=False,
    )


def affine_weights(graph: ir.Graph) -> list[str]:
    """Return the initializers that are weights or biases of matrix products, not other constants.

    Models of skl2onnx hold many numbers, such as the 1 in ``1 - p``, that nobody wants to train.
    """
    names: dict[str, None] = {}
    for node in graph:
        inputs = [x for x in node.inputs if x is not None]
        bias = node.op_type == "Add" and any(_is_product(x) for x in inputs)
        if bias or node.op_type in ("MatMul", "Gemm"):
            names.update({x.name or "": None for x in inputs if x.const_value is not None})
    return [n for n in graph.initializers if n in names and S.is_float(graph.initializers[n])]


def _is_product(x: ir.Value) -> bool:
    producer = x.producer()
    return producer is not None and producer.op_type in ("MatMul", "Gemm")


def _parameters(model: ir.Model, train: Any, freeze: list[str]) -> list[str]:
    base = load_normalized(ir.to_proto(model)) if train is None else model
    return [x.name or "" for x in candidates(base, train, freeze or None)]


def _the_output(model: ir.Model, output: str | None) -> ir.Value:
    outputs = list(model.graph.outputs)
    if output is not None:
        for y in (*outputs, *(y for node in model.graph for y in node.outputs)):
            if y.name == output:
                return y
        known = ", ".join(str(y.name) for y in outputs)
        raise PrepareError(f"no such output: {output!r}\nhint: the model has {known}")
    floats = [y for y in outputs if S.is_float(y)]
    if not floats:
        raise PrepareError("the model has no float output\nhint: name an inner value in `output`")
    return floats[0]


def _before_softmax(value: ir.Value, from_logits: bool | None) -> tuple[ir.Value, str]:
    """Cut off what turns logits to probabilities: the loss has a form that does not overflow."""
    if from_logits:
        return value, "logits"
    producer = value.producer()
    while producer is not None and producer.op_type in ("Identity", "Cast"):
        producer = producer.inputs[0].producer() if producer.inputs[0] is not None else None
    if producer is not None and producer.op_type in ("Softmax", "Sigmoid"):
        x = producer.inputs[0]
        assert x is not None
        dims = S.dims_of(value) or S.dims_of(x)
        single = dims is not None and (len(dims) == 1 or dims[-1] == 1)
        axis = producer.attributes.get_int("axis", -1) if producer.op_type == "Softmax" else -1
        if (producer.op_type == "Softmax" and axis in (-1, 1)) or single:
            return x, "logits"
        return value, "probabilities"
    if from_logits is False or "prob" in (value.name or "").lower():
        return value, "probabilities"
    return value, "logits"


def _tensor(x: ir.Value) -> Any:
    assert x.const_value is not None
    return x.const_value


def _numpy(x: ir.Value) -> str:
    if x.dtype is None:
        return "float32"
    return "str" if x.dtype == ir.DataType.STRING else x.dtype.numpy().name
