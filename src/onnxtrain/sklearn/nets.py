"""The net behind an estimator: preprocessing and a trainable tail, with their sessions.

``split_model`` cuts a model into preprocessing, which no trained parameter affects and which runs
once, and a trainable tail; ``Net`` holds both. ``dense_net`` builds a multi-layer perceptron.
``convert`` exports a fitted scikit-learn estimator, its last step in differentiable operators.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import compose
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from onnxtrain.artifacts.trainable import select_parameters
from onnxtrain.autodiff.gradients import lift, load_normalized
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.errors import MissingExtraError, PrepareError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.graph.shapes.unknown import specialize
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.modes import to_evaluation
from onnxtrain.optim import Optimizer
from onnxtrain.runtime import session as runtime
from onnxtrain.sklearn.epochs import Epoch, Penalty, epoch_model, objective

ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid", "identity": "Identity"}
PREFIX = "pre/"
PRODUCER = "skl2onnx"
_OPSET = {"": 20, "ai.onnx.ml": 3}
# skl2onnx emits ai.onnx.ml operators for these estimators; black-listed, it emits MatMul and Add.
_LINEAR_OPERATORS = {"LinearRegressor", "LinearClassifier", "Scaler", "Normalizer"}
# Below this work per step, the overhead of threads exceeds their gain.
_SINGLE_THREAD_FLOPS = 2e7
_CACHE_SIZE = 64  # sessions
_cache: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Net:
    """A model cut into preprocessing and trainable tail; it can be pickled."""

    key: tuple[Any, ...]
    """Cache key: equal for nets that differ only in the values of trained parameters."""
    full: bytes
    """The whole model, for inference."""
    before: bytes | None
    """The preprocessing, or ``None``."""
    tail: bytes
    """The part after preprocessing, up to the raw predictions; only this part is differentiated."""
    kind: str
    """Kind of output: ``"values"``, ``"logits"`` or ``"probabilities"``."""
    columns: int
    rank: int
    parameters: tuple[str, ...]
    penalized: tuple[str, ...]
    """Parameters with two or more axes, to which penalties apply."""
    buffers: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    """Name and numpy type of each input of the whole model."""
    features: tuple[tuple[str, str], ...]
    """Name and numpy type of each input of the tail."""
    chosen_by_user: bool

    def initial(self) -> dict[str, np.ndarray]:
        """Return the values of parameters and buffers in the model."""
        known = ir.from_proto(onnx.load_from_string(self.tail)).graph.initializers
        names = (*self.parameters, *self.buffers)
        return {n: np.array(_constant_tensor(known[n]).numpy()) for n in names}

    @property
    def built(self) -> bool:
        """Whether ``dense_net`` built it, with a symbolic batch size."""
        return self.key[0] == "dense"

    def threads(
        self, requested: int | None, rows: int, values: Mapping[str, np.ndarray]
    ) -> int | None:
        """Return the number of threads: by default one for small nets, all cores for others."""
        if requested is not None:
            return requested
        work = 6.0 * rows * sum(values[n].size for n in self.parameters)
        return 1 if work < _SINGLE_THREAD_FLOPS else None

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
        """Return the model of an epoch and its session; ``rows`` fixes the batch size."""

        def make() -> tuple[Epoch, Any]:
            function = objective(loss, weighted=weighted, penalty=penalty, weights=self.penalized)
            source = load(onnx.load_from_string(self.tail))
            base = load_normalized(source if rows is None else specialize(source, {"batch": rows}))
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

        settings = dataclasses.replace(optimizer, lr=1.0)  # the learning rate is an input
        loss_key = None if callable(loss) else repr(loss)
        key = (self.key, loss_key, repr(settings), penalty, weighted, device, threads, rows)
        return cached(None if loss_key is None else ("epoch", *key), make)

    def run(
        self,
        values: Mapping[str, np.ndarray],
        feeds: dict[str, np.ndarray],
        *,
        device: str,
        threads: int | None,
    ) -> np.ndarray:
        """Return raw predictions for preprocessed rows."""

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
        input_names = {x.name for x in session.get_inputs()}
        arrays = runtime.run(session, names, {n: a for n, a in feeds.items() if n in input_names})
        return {
            **{n: a for n, a in feeds.items() if n in dict(self.features)},
            **dict(zip(names, arrays, strict=True)),
        }

    def trained(self, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        """Return the whole model with these parameter values."""
        model = onnx.load_from_string(self.full)
        for tensor in model.graph.initializer:
            if tensor.name in values:
                array = np.ascontiguousarray(values[tensor.name])
                fresh = ir.to_proto(ir.Tensor(array, name=tensor.name))
                tensor.CopyFrom(fresh)
        return model


def cached(key: Any, make: Callable[[], Any]) -> Any:
    """Return the cached object for a key, or create it; equal estimators share sessions."""
    if key is None:
        return make()
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    created = make()
    with _lock:
        _cache[key] = created
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return created


def split_model(
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
    """Cut a model into preprocessing and trainable tail.

    Args:
        model: any model that :func:`onnxtrain.load` accepts.
        rows: a function that returns a few rows of data for the inputs of a model.
        classifier: whether the output has class scores; a Softmax or Sigmoid at the end is removed.
        output: the output to train on; by default the first float output.
        from_logits: whether that output has logits; ``None`` infers it from the graph.
        train: names or globs of parameters to train.
        freeze: names or globs of parameters to freeze.
        kind_key: cache key of the net except its parameter values; by default a hash of the tail.
    """
    whole = load_any_domain(model)
    full = ir.to_proto(whole)
    graph = whole.graph
    inputs = tuple((x.name or "", _dtype_name(x)) for x in graph.inputs)
    value = _select_output(whole, output)
    kind = "values"
    if classifier:
        value, kind = _before_softmax(value, from_logits)
    keep_output(whole, value)
    submodel = ir.from_proto(ir.to_proto(whole))
    sample = rows(submodel)
    frozen = [] if freeze is None else [freeze] if isinstance(freeze, str) else list(freeze)
    if submodel.producer_name == PRODUCER and train is None:
        train = [n for n in affine_weights(submodel.graph) if not n.startswith(PREFIX)] or None
    names = _parameters(submodel, train, frozen)
    parts = split_preprocessing(submodel, names, sample)
    base = load_normalized(ir.to_proto(parts.tail))
    (raw,) = base.graph.outputs
    dims = S.dims_of(raw)
    if dims is None or len(dims) not in (1, 2) or (len(dims) == 2 and not isinstance(dims[1], int)):
        raise PrepareError(
            f"the output must be [batch] or [batch, columns], got {S.describe_value(raw)}\n"
            "hint: select another one with output=..., or give the model a fixed number of columns"
        )
    known = base.graph.initializers
    unused = [n for n in names if n not in known]
    names = [n for n in names if n in known]
    if not names:
        raise PrepareError(f"the output depends on none of the parameters {', '.join(unused)}")
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
        penalized=tuple(n for n in names if _constant_tensor(known[n]).numpy().ndim > 1),
        buffers=tuple(n for n, x in known.items() if x in statistics and n not in names),
        inputs=inputs,
        features=tuple((x.name or "", _dtype_name(x)) for x in parts.tail.graph.inputs),
        chosen_by_user=False,
    )


def _select_output(model: ir.Model, output: str | None) -> ir.Value:
    outputs = list(model.graph.outputs)
    if output is not None:
        for y in (*outputs, *(y for node in model.graph for y in node.outputs)):
            if y.name == output:
                return y
        known = [str(y.name) for y in outputs]
        raise PrepareError(f"unknown output: {output!r} {expected_one_of(output, known)}")
    floats = [y for y in outputs if S.is_float(y)]
    if not floats:
        raise PrepareError(
            "the model has no float output\nhint: select an intermediate value with output=..."
        )
    return floats[0]


def _before_softmax(value: ir.Value, from_logits: bool | None) -> tuple[ir.Value, str]:
    """Return the logits before a final Softmax or Sigmoid, which the loss computes stably."""
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


def _parameters(model: ir.Model, train: Any, freeze: list[str]) -> list[str]:
    base = load_normalized(ir.to_proto(model)) if train is None else Prepared.of(model)
    return [x.name or "" for x in select_parameters(base, train, freeze or None)]


def affine_weights(graph: ir.Graph) -> list[str]:
    """Return the initializers that are weights or biases of MatMul and Gemm nodes.

    skl2onnx also stores constants as initializers, such as the 1 in ``1 - p``; these are not
    parameters.
    """
    names: dict[str, None] = {}
    for node in graph:
        inputs = [x for x in node.inputs if x is not None]
        bias = node.op_type == "Add" and any(_is_matmul(x) for x in inputs)
        if bias or node.op_type in ("MatMul", "Gemm"):
            names.update({x.name or "": None for x in inputs if x.const_value is not None})
    return [n for n in graph.initializers if n in names and S.is_float(graph.initializers[n])]


def _is_matmul(x: ir.Value) -> bool:
    producer = x.producer()
    return producer is not None and producer.op_type in ("MatMul", "Gemm")


def load_any_domain(model: object) -> ir.Model:
    """Load a model with operators of any standard domain, ``ai.onnx.ml`` included."""
    return load(model, allow_domains={"ai.onnx.ml"})  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model cut into preprocessing and trainable tail."""

    before: onnx.ModelProto | None
    """Computes the inputs of the tail, under their names; ``None`` without preprocessing."""
    tail: ir.Model


def split_preprocessing(
    model: ir.Model, names: Sequence[str], rows: Mapping[str, np.ndarray]
) -> SplitModel:
    """Cut a model with one output before the nodes that depend on ``names``.

    Args:
        model: the model; it is modified.
        names: names of the trained initializers.
        rows: a few rows of data for each input, to determine shapes at the cut.
    """
    graph = model.graph
    dependent = depends_on(graph, names)
    fixed = _constant_values(graph)
    cut: dict[ir.Value, None] = {}
    for node in dependent:
        for x in _reads(node):
            if x is None or x.const_value is not None or x in fixed:
                continue
            producer = x.producer()
            if producer is None or (producer not in dependent and producer.graph is graph):
                cut[x] = None
    precomputed = [x for x in cut if x.producer() is not None]
    if not precomputed or not _can_cut_at(graph, cut):
        return SplitModel(None, model)
    before = model.clone()
    values = {x.name: x for node in before.graph for x in node.outputs}
    values.update({x.name: x for x in before.graph.inputs})
    before.graph.outputs.clear()
    before.graph.outputs.extend(values[x.name] for x in precomputed)
    proto = _without_dead_nodes(before)
    shapes = _check_row_counts(proto, rows)
    for x in precomputed:
        array, batched = shapes[x.name or ""]
        if not batched:  # not one entry per row, so it cannot be precomputed
            return SplitModel(None, model)
        producer = x.producer()
        assert producer is not None
        new = ir.Value(
            name=x.name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(["batch", *array.shape[1:]]),
        )
        x.name = f"{x.name}/before"
        x.replace_all_uses_with(new)
        graph.inputs.append(new)
    keep_output(model, graph.outputs[0])
    return SplitModel(proto, ir.from_proto(ir.to_proto(model)))


def _can_cut_at(graph: ir.Graph, cut: Mapping[ir.Value, None]) -> bool:
    """Return whether all values at the cut can become inputs of the tail, or already are."""
    return all(x.producer() is not None or x in list(graph.inputs) for x in cut)


def _constant_values(graph: ir.Graph) -> set[ir.Value]:
    known: set[ir.Value | None] = set(graph.initializers.values())
    for node in graph:
        if all(x is None or x in known for x in _reads(node)):
            known.update(node.outputs)
    return {x for x in known if x is not None}


def _without_dead_nodes(model: ir.Model) -> onnx.ModelProto:
    needed: set[ir.Value | None] = set(model.graph.outputs)
    for node in reversed(list(model.graph)):
        if needed & set(node.outputs):
            needed.update(_reads(node))
        else:
            model.graph.remove(node)
    for name, x in list(model.graph.initializers.items()):
        if x not in needed:
            model.graph.initializers.pop(name)
    for y in model.graph.outputs:
        if y.type is None:
            y.type = ir.TensorType(ir.DataType.FLOAT)
    return ir.to_proto(model)


def _check_row_counts(
    proto: onnx.ModelProto, rows: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, bool]]:
    """Run preprocessing on a few rows; return each output, and whether it has one entry per row."""
    session = runtime.create(proto.SerializeToString(), threads=1)
    names = [y.name for y in session.get_outputs()]
    input_names = {x.name for x in session.get_inputs()}
    feeds = {n: a for n, a in rows.items() if n in input_names}
    count = len(next(iter(feeds.values()))) if feeds else 0
    if not count:
        raise PrepareError(
            "the model reads no input\nhint: check that its data is an input, not a constant"
        )
    whole = runtime.run(session, names, feeds)
    one_row = runtime.run(session, names, {n: a[:1] for n, a in feeds.items()})
    return {
        n: (a, a.ndim > 0 and a.shape[0] == count and b.shape[0] == 1)
        for n, a, b in zip(names, whole, one_row, strict=True)
    }


def keep_output(model: ir.Model, value: ir.Value) -> None:
    """Make a value the only output and remove everything it does not depend on, in place."""
    graph = model.graph
    needed: set[ir.Value | None] = {value}
    for node in reversed(list(graph)):
        if needed & set(node.outputs):
            needed.update(_reads(node))
        else:
            graph.remove(node)
    graph.outputs.clear()
    graph.outputs.append(value)
    for name, x in list(graph.initializers.items()):
        if x not in needed:
            graph.initializers.pop(name)
    unused = [x for x in graph.inputs if x not in needed]
    for x in unused:
        graph.inputs.remove(x)


def depends_on(graph: ir.Graph, names: Iterable[str]) -> set[ir.Node]:
    """Return all nodes that depend on these initializers."""
    sources = set(names)
    changed = {x for n, x in graph.initializers.items() if n in sources}
    nodes: set[ir.Node] = set()
    for node in graph:
        if any(x in changed for x in _reads(node) if x is not None):
            nodes.add(node)
            changed.update(node.outputs)
    return nodes


def _reads(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a node and the outer values that its subgraphs read."""
    values = list(node.inputs)
    for attribute in node.attributes.values():
        graphs = []
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        for graph in graphs:
            values += [*graph.outputs, *(x for inner in graph for x in _reads(inner))]
    return values


def _constant_tensor(x: ir.Value) -> Any:
    assert x.const_value is not None
    return x.const_value


def _dtype_name(x: ir.Value) -> str:
    if x.dtype is None:
        return "float32"
    return "str" if x.dtype == ir.DataType.STRING else x.dtype.numpy().name


def dense_weights(
    sizes: Sequence[int], activation: str, random: np.random.RandomState
) -> dict[str, np.ndarray]:
    """Return the initial weights, named ``coefs.0``, ``intercepts.0`` ...

    They equal those of scikit-learn's MLP for the same random state: uniform within a bound that
    depends on the layer sizes. Without hidden layers they are zero.
    """
    if activation not in ACTIVATIONS:
        raise PrepareError(
            f"unknown activation: {activation!r} {expected_one_of(activation, ACTIVATIONS)}"
        )
    factor = 2.0 if activation == "logistic" else 6.0
    weights = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = 0.0 if len(sizes) == 2 else np.sqrt(factor / (fan_in + fan_out))
        weights[f"coefs.{i}"] = random.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)
        weights[f"intercepts.{i}"] = random.uniform(-bound, bound, fan_out).astype(np.float32)
    return weights


def dense_net(activation: str, weights: Mapping[str, np.ndarray]) -> ir.Model:
    """Return a net of dense layers, ``X [batch, features] -> raw [batch, outputs]``."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="net")
    op = OpBuilder(graph)
    x = op.input("X", ir.DataType.FLOAT, ["batch", weights["coefs.0"].shape[0]])
    last = len(weights) // 2 - 1
    for i in range(last + 1):
        names = (f"coefs.{i}", f"intercepts.{i}")
        x = op.Gemm(x, *(_weight(graph, n, weights[n]) for n in names))
        if i < last and activation != "identity":
            x = op.emit(ACTIVATIONS[activation], x)
    x.name = "raw"
    graph.outputs.append(x)
    return ir.Model(graph, ir_version=IR_VERSION)


def _weight(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def convert(estimator: Any, X: Any) -> onnx.ModelProto:
    """Return a fitted estimator or pipeline as an ONNX model.

    A pipeline is converted in two parts: names of nodes and initializers before the last step get
    the prefix ``pre/`` and are not trained.

    Args:
        estimator: a fitted estimator that skl2onnx supports.
        X: example rows, which determine names and types of the inputs.

    Raises:
        PrepareError: if it is not fitted or cannot be converted.
    """
    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise PrepareError(
            f"{type(estimator).__name__} is not fitted\nhint: call fit before passing it as model"
        ) from error
    example = X[:1]
    if not hasattr(X, "columns"):  # columns of a data frame keep their own types
        example = np.asarray(example, np.float32)
    estimator = getattr(estimator, "estimator", estimator) if _is_frozen(estimator) else estimator
    if not isinstance(estimator, Pipeline) or len(estimator.steps) < 2:
        last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
        return _to_onnx(last, example, black_op=_LINEAR_OPERATORS)
    before, last = estimator[:-1], estimator.steps[-1][1]
    first = _to_onnx(before, example)
    width = before.transform(X[:1]).shape[1]
    from skl2onnx.common.data_types import FloatTensorType

    features = [("features", FloatTensorType([None, width]))]
    tail = _to_onnx(last, initial_types=features, black_op=_LINEAR_OPERATORS)
    first.ir_version = tail.ir_version = min(first.ir_version, tail.ir_version)
    opsets = {d.domain: d.version for m in (first, tail) for d in m.opset_import}
    for model in (first, tail):
        del model.opset_import[:]
        for domain, version in opsets.items():
            model.opset_import.add(domain=domain, version=version)
    whole = compose.merge_models(
        compose.add_prefix(first, PREFIX, rename_inputs=False),
        tail,
        io_map=[(PREFIX + first.graph.output[0].name, "features")],
    )
    whole.producer_name = PRODUCER
    return whole


def _is_frozen(estimator: Any) -> bool:
    return type(estimator).__name__ == "FrozenEstimator"


def _to_onnx(estimator: Any, *data: Any, **options: Any) -> onnx.ModelProto:
    try:
        from skl2onnx import to_onnx
    except ImportError as error:
        raise MissingExtraError(
            'skl2onnx is not installed\nhint: pip install "onnxtrain[sklearn]"'
        ) from error
    if hasattr(estimator, "predict_proba"):
        options["options"] = {id(estimator): {"zipmap": False}}
    try:
        model: Any = to_onnx(estimator, *data, target_opset=_OPSET, **options)
    except Exception as error:  # skl2onnx's errors share no base class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PrepareError(
            f"skl2onnx cannot convert {type(estimator).__name__}: {reason}\n"
            "hint: pass an ONNX model instead"
        ) from error
    return model
