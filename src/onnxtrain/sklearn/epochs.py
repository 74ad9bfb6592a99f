"""Train a whole epoch with one ONNX model: a Loop whose body is one training step.

A step of a small net takes less time than the call that runs it, so the loop over batches is in the
graph. It gathers the rows of each batch from the data in a given order, and carries parameters and
optimizer state from step to step. Parameters of one dtype are packed into one vector: the optimizer
then has one update instead of one per layer.

``Epochs`` runs the model, ``epoch_model`` builds it, ``objective`` is the loss it minimizes: the
weighted mean of row losses plus a penalty on the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.build_options import BuildOptions, Selection
from onnxtrain.artifacts.graphs import DifferentiatedModel, ModelCopy, differentiate_loss
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.errors import PrepareError, expected_one_of
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.losses import (
    BCE,
    L1,
    LOSSES,
    MSE,
    NLL,
    BCEWithLogits,
    CrossEntropy,
    Hinge,
    Huber,
    Loss,
    MultiMargin,
    resolve,
)
from onnxtrain.losses.loss import check_same_rank
from onnxtrain.optim import SGD, Optimizer, Schedule, resolve_schedule
from onnxtrain.optim.vectors import Pack, groups_with_equal_settings
from onnxtrain.registry import unknown_name_error
from onnxtrain.runtime import session as runtime

if TYPE_CHECKING:
    from onnxtrain.sklearn.estimator import OnnxEstimator


_INT64, _FLOAT, _BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL
LossFunction = Callable[..., ir.Value]
PENALTIES = ("l1", "l2", "elasticnet", "elastic")
_LOSS_DTYPE = ir.DataType.FLOAT
_MIN_PROBABILITY = 1e-10  # log(0) is infinite
SAMPLE_WEIGHT = "sample_weight"


class Epochs:
    """Run epochs on one dataset; parameters stay packed between epochs."""

    def __init__(
        self,
        estimator: OnnxEstimator,
        X: Any,
        y: np.ndarray,
        weight: np.ndarray | None,
    ) -> None:
        self.estimator, net = estimator, estimator._net
        self.rows = len(y)
        self.batch = min(int(estimator.batch_size), self.rows)
        self.count = -(-self.rows // self.batch)
        self.parts = self._sessions(weighted=weight is not None)
        features = net.preprocess(estimator._feeds(X, net.inputs))
        self.data = {f"epoch/{n}": features[n] for n in self.epoch.inputs}
        self.data["epoch/target"] = self._target(y)
        if weight is not None:
            self.data[f"epoch/{SAMPLE_WEIGHT}"] = weight
        if self.epoch.random:
            self.data["epoch/seed"] = np.array([estimator._seed], np.float32)
        constant_buffers = [b for b in net.buffers if b not in self.epoch.buffers]
        self.data.update({f"epoch/{n}": estimator._values[n] for n in constant_buffers})
        sizes = np.full(self.count, self.batch)
        sizes[-1] = self.rows - self.batch * (self.count - 1)
        self.share = sizes / self.rows
        self.schedule = _schedule(estimator.schedule, self.count * int(estimator.max_iter))
        self.carried = self._load()
        self.names = [f"epoch/{n}.out" for n in self.epoch.carried]

    def _sessions(self, *, weighted: bool) -> list[_Part]:
        """Return the parts of an epoch; ``self.epoch`` and ``self.session`` are those of the last.

        Full batches run in a graph with a fixed batch size, the remainder in one with a symbolic
        size.
        """
        estimator, net = self.estimator, self.estimator._net
        penalty = Penalty.of(estimator.penalty, estimator.alpha, estimator.l1_ratio)
        threads = net.threads(estimator.threads, self.batch, estimator._values)
        loss, optimizer = estimator._loss(), estimator._optimizer()

        def prepared(rows: int | None) -> tuple[Epoch, Any]:
            return net.epoch(
                loss,
                optimizer,
                penalty,
                weighted=weighted,
                device=estimator.device,
                threads=threads,
                rows=rows,
            )

        full = self.rows // self.batch
        fixed = net.built and full > 1
        parts: list[_Part] = []
        if fixed:
            self.epoch, self.session = prepared(self.batch)
            parts.append(_Part(self.session, 0, full, self.batch, fixed=True))
        if not fixed or full < self.count:
            first = full if fixed else 0
            self.epoch, self.session = prepared(None)
            size = self.rows - full * self.batch if fixed else self.batch
            parts.append(_Part(self.session, first, self.count, size, fixed=False))
        return parts

    def _target(self, y: np.ndarray) -> np.ndarray:
        """Return the targets with the dtype and shape of the graph's input."""
        net = self.estimator._net
        kinds = {x.name: x.type for x in self.session.get_inputs()}
        if kinds["epoch/target"] == "tensor(int64)":
            y = y.astype(np.int64)
        else:
            shape = (self.rows, net.columns) if net.rank == 2 else (self.rows,)
            dtype = "float64" if kinds["epoch/target"] == "tensor(double)" else "float32"
            y = y.reshape(shape).astype(dtype)
        return np.ascontiguousarray(y)

    def _load(self) -> list[np.ndarray]:
        values, state = self.estimator._values, self.estimator._state
        carried = [p.join_arrays(values) for p in self.epoch.packs]
        for name, (dims, dtype, start) in self.epoch.state.items():
            known = state.get(name)
            carried.append(np.full(dims, start, dtype) if known is None else known)
        return [*carried, *(values[n] for n in self.epoch.buffers)]

    def run(self) -> float:
        """Train for one epoch; return the mean loss of its rows."""
        estimator = self.estimator
        order = (
            estimator._random.permutation(self.rows) if estimator.shuffle else np.arange(self.rows)
        )
        base = float(estimator.learning_rate)
        if self.schedule is None:
            rates = np.full(self.count, base, np.float32)
        else:
            steps = range(estimator.t_ + 1, estimator.t_ + self.count + 1)
            rates = np.array([self.schedule.lr(base, n) for n in steps], np.float32)
        losses = [part.run(self, order, rates) for part in self.parts]
        estimator.t_ += self.count
        return float(np.concatenate(losses).astype(np.float64) @ self.share)

    def store(self) -> None:
        """Store the current parameters and optimizer state in the estimator."""
        estimator, epoch = self.estimator, self.epoch
        carried = dict(zip(epoch.carried, self.carried, strict=True))
        values = dict(estimator._values)
        for pack in epoch.packs:
            values.update(pack.split_array(carried[pack.name]))
        values.update({n: carried[n] for n in epoch.buffers})
        estimator._values = values
        estimator._state = {n: carried[n] for n in epoch.state}


class _Part:
    """Consecutive batches of an epoch, of one size except the last."""

    def __init__(self, session: Any, first: int, last: int, rows: int, *, fixed: bool) -> None:
        self.session, self.first, self.last = session, first, last
        self.rows, self.fixed = rows, fixed
        self.inputs = [x.name for x in session.get_inputs()]

    def run(self, whole: Epochs, order: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """Train on the batches; return their losses."""
        start = self.first * whole.batch
        count = self.last - self.first
        pick = order[start : start + count * self.rows].astype(np.int64, copy=False)
        feeds = {
            **whole.data,
            **{f"epoch/{n}": a for n, a in zip(whole.epoch.carried, whole.carried, strict=True)},
            "epoch/order": pick.reshape(count, self.rows) if self.fixed else pick,
            "epoch/batches": np.array(count, np.int64),
            "epoch/rows_per_batch": np.array([self.rows], np.int64),
            "epoch/rates": rates[self.first : self.last],
            "epoch/steps_before": np.array(whole.estimator.t_ + self.first, np.int64),
        }
        feeds = {n: feeds[n] for n in self.inputs}
        names = [*whole.names, "epoch/losses"]
        *whole.carried, losses = runtime.run(self.session, names, feeds)
        return losses


def _schedule(schedule: Any, total: int) -> Schedule | None:
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    return resolve_schedule(schedule, total=total)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """A model that trains for one epoch, with the names of its inputs and state."""

    model: onnx.ModelProto
    packs: tuple[Pack, ...]
    state: dict[str, tuple[tuple[int, ...], np.dtype[Any], float]]
    """Shape, dtype and initial value of each optimizer state tensor."""
    buffers: tuple[str, ...]
    targets: tuple[str, ...]
    inputs: tuple[str, ...]
    random: bool

    @property
    def carried(self) -> list[str]:
        """Names of the values carried from step to step."""
        return [*(p.name for p in self.packs), *self.state, *self.buffers]

    @property
    def parameters(self) -> list[str]:
        """Names of all trained parameters."""
        return [n for p in self.packs for n in p.members]


def epoch_model(
    base: Prepared,
    loss: LossFunction,
    optimizer: Optimizer,
    parameters: Sequence[str],
    *,
    chosen_by_user: bool,
    rows: int | None = None,
) -> Epoch:
    """Build the model of an epoch.

    Args:
        base: a net with one output; it is not modified.
        loss: a function of the builder that adds its targets as inputs and returns a scalar.
        optimizer: the optimizer.
        parameters: names of the initializers to train.
        chosen_by_user: whether to raise if one of them does not affect the loss.
        rows: the batch size if it is fixed in ``base``; sizes are constants then.
    """
    statistics = batch_statistics(base.graph)
    selection = Selection(
        candidates=tuple(parameters),
        explicit=chosen_by_user,
        buffers=tuple(n for n, x in base.graph.initializers.items() if x in statistics),
    )
    options = BuildOptions(loss=loss, optimizer=optimizer)
    origin = differentiate_loss(base.copy(), options, selection)
    copy = origin.copy("step", "cpu")
    packs = _packs(copy, optimizer)
    return _EpochLoopBuilder(origin, copy, packs, optimizer, rows).build()


def _packs(copy: ModelCopy, optimizer: Optimizer) -> list[Pack]:
    shapes = {n: tuple(copy.op.static(x) or ()) for n, x in copy.parameters.items()}
    dtypes = {n: x.dtype.numpy() for n, x in copy.parameters.items() if x.dtype is not None}
    # The update of plain SGD is two nodes per parameter: cheaper than packing and unpacking.
    plain = isinstance(optimizer, SGD) and not optimizer.momentum and not optimizer.weight_decay
    if plain or not optimizer.elementwise or optimizer.groups:
        return [Pack(n, (n,), (shape,), dtypes[n]) for n, shape in shapes.items()]
    return [
        Pack(
            f"parameters/{dtypes[names[0]].name}",
            names,
            tuple(shapes[n] for n in names),
            dtypes[names[0]],
        )
        for names in groups_with_equal_settings(optimizer, dtypes)
    ]


class _EpochLoopBuilder:
    """Build the Loop of an epoch from a differentiated model."""

    def __init__(
        self,
        origin: DifferentiatedModel,
        copy: ModelCopy,
        packs: Sequence[Pack],
        optimizer: Optimizer,
        rows: int | None,
    ) -> None:
        self.origin, self.copy, self.packs, self.optimizer = origin, copy, packs, optimizer
        self.rows = rows
        self.state: dict[str, tuple[tuple[int, ...], np.dtype[Any], float]] = {}

    def build(self) -> Epoch:
        copy, op = self.copy, self.copy.op
        graph = op.graph
        lr = op.input("learning_rate", _FLOAT, [1])
        step = op.input("step", _INT64, [1])
        vectors = {p.name: self._unpack(p) for p in self.packs}
        gradients = {p.name: p.join(op, copy.gradients) for p in self.packs}
        slots: dict[str, ir.Value] = {}
        for name, x in vectors.items():
            assert x.dtype is not None
            for slot in self.optimizer.slots(name, op.static(x) or (), x.dtype):
                key = f"{name}.{slot.name}"
                slots[key] = op.input(key, slot.dtype, list(slot.dims))
                self.state[key] = (slot.dims, slot.dtype.numpy(), slot.init)
        new, new_state = self.optimizer.apply(op, vectors, gradients, slots, lr, step)
        updated_buffers = [n for n in copy.buffers if n in copy.new_buffers]
        results = [copy.loss, *new.values(), *(new_state[k] for k in slots)]
        results += [copy.new_buffers[n] for n in updated_buffers]
        for y in results:
            out = op.Identity(y)
            out.type, out.shape = y.type, y.shape
            graph.outputs.append(out)
        carried = [*vectors.values(), *slots.values(), *(copy.buffers[n] for n in updated_buffers)]
        step_inputs = [*copy.inputs, *copy.targets, *copy.rng, lr, step, *carried]
        constant_buffers = [x for n, x in copy.buffers.items() if n not in updated_buffers]
        graph.inputs.clear()
        graph.inputs.extend([*step_inputs, *constant_buffers])
        names = [x.name or "" for x in graph.inputs]
        work = simplify(ir.Model(graph, ir_version=IR_VERSION))
        inner = dict(zip(names, work.graph.inputs, strict=True))
        model = self._loop(work.graph, inner, [x.name or "" for x in carried], constant_buffers)
        return Epoch(
            model=model,
            packs=tuple(self.packs),
            state=self.state,
            buffers=tuple(updated_buffers),
            targets=tuple(x.name or "" for x in copy.targets),
            inputs=tuple(x.name or "" for x in copy.inputs),
            random=bool(copy.rng),
        )

    def _unpack(self, pack: Pack) -> ir.Value:
        """Make the packed vector an input of the step, and slice the parameters from it."""
        op, values = self.copy.op, self.copy.parameters
        if not pack.joined:
            return values[pack.name]
        first = next(iter(op.graph), None)
        vector = op.input(pack.name, ir.DataType.from_numpy(pack.dtype), [sum(pack.sizes)])
        front = OpBuilder(op.graph, "unpack/", before=first)
        front.names = op.names
        for name, part in pack.split(front, vector).items():
            values[name].replace_all_uses_with(part)
        return vector

    def _loop(
        self,
        body: ir.Graph,
        inner: dict[str, ir.Value],
        carried: Sequence[str],
        constant_buffers: Sequence[ir.Value],
    ) -> onnx.ModelProto:
        """Wrap the step in a Loop that gathers its batches from the whole data."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="epoch")
        outer = OpBuilder(graph, "epoch/")
        copy = self.copy
        whole = {
            x.name or "": _epoch_input(outer, inner, x.name or "", whole=True)
            for x in (*copy.inputs, *copy.targets)
        }
        order_dims = ["batches", self.rows] if self.rows is not None else ["rows"]
        order = outer.input("epoch/order", _INT64, order_dims)
        batches = outer.input("epoch/batches", _INT64, [])
        rates = outer.input("epoch/rates", _FLOAT, ["batches"])
        before = outer.input("epoch/steps_before", _INT64, [])
        seed = [outer.input("epoch/seed", _FLOAT, [1])] if copy.rng else []
        initial = [_epoch_input(outer, inner, name) for name in carried]
        for x in constant_buffers:
            inner[x.name or ""].replace_all_uses_with(_epoch_input(outer, inner, x.name or ""))

        op = OpBuilder(body, "batch/", before=next(iter(body), None))
        index, continue_ = op.input("batch/index", _INT64, []), op.input("batch/going", _BOOL, [])
        pick = self._rows_of(outer, op, order, index)
        for name, x in whole.items():
            inner[name].replace_all_uses_with(op.Gather(x, pick, axis=0))
        _replace_by_scalar(op, inner["learning_rate"], op.Gather(rates, index, axis=0))
        number = op.Add(op.Add(index, before), 1) if copy.rng or inner["step"].uses() else index
        _replace_by_scalar(op, inner["step"], number)
        if copy.rng:
            draw = op.Cast(op.Mod(op.Reshape(number, [1]), 1 << 24), to=_FLOAT)
            inner[copy.rng[0].name or ""].replace_all_uses_with(op.Concat(seed[0], draw, axis=0))
        loss, *results = list(body.outputs)
        body.inputs.clear()
        body.inputs.extend([index, continue_, *(inner[n] for n in carried)])
        body.outputs.clear()
        body.outputs.extend([op.Identity(continue_), *results, loss])
        body.name = "step"
        body.opset_imports.clear()
        _append_loop(graph, batches, initial, body)
        return finalize(ir.Model(graph, ir_version=IR_VERSION))

    def _rows_of(
        self, outer: OpBuilder, op: OpBuilder, order: ir.Value, index: ir.Value
    ) -> ir.Value:
        """Return the row indices of one batch."""
        if self.rows is not None:
            return op.Gather(order, index, axis=0)
        rows = outer.input("epoch/rows_per_batch", _INT64, [1])
        start = op.Mul(index, rows)
        return op.Slice(order, start, op.Add(start, rows))


def _epoch_input(
    outer: OpBuilder, inner: Mapping[str, ir.Value], name: str, *, whole: bool = False
) -> ir.Value:
    """Add the epoch's input for an input of the step; ``whole``: with all rows of the data."""
    x = inner[name]
    assert x.dtype is not None
    assert x.shape is not None
    dims = [d if isinstance(d, int) else str(d.value) for d in x.shape]
    return outer.input(f"epoch/{name}", x.dtype, ["rows", *dims[1:]] if whole else dims)


def _append_loop(
    graph: ir.Graph, count: ir.Value, initial: Sequence[ir.Value], body: ir.Graph
) -> None:
    """Append the Loop; its outputs, with the losses last, become the graph outputs."""
    loop = ir.Node(
        "",
        "Loop",
        [count, None, *initial],
        attributes=[ir.AttrGraph("body", body)],
        num_outputs=len(initial) + 1,
        version=OPSET,
    )
    graph.append(loop)
    loop.name = "epoch/loop"
    *final, losses = loop.outputs
    for end, start in zip(final, initial, strict=True):
        end.name = f"{start.name}.out"
        end.type, end.shape = start.type, start.shape
    losses.name, losses.type = "epoch/losses", ir.TensorType(_FLOAT)
    losses.shape = ir.Shape(["batches"])
    graph.outputs.extend(loop.outputs)


def _replace_by_scalar(op: OpBuilder, x: ir.Value, scalar: ir.Value) -> None:
    """Replace ``x [1]`` with a scalar, and remove Reshape nodes that make ``x`` a scalar."""
    for node, _ in list(x.uses()):
        if node.op_type == "Reshape" and node.outputs[0].shape == ir.Shape([]):
            node.outputs[0].replace_all_uses_with(scalar)
            op.graph.remove(node, safe=True)
    if x.uses():
        x.replace_all_uses_with(op.Reshape(scalar, [1]))


def objective(
    loss: Any, *, weighted: bool, penalty: Penalty | None, weights: Sequence[str]
) -> Callable[..., ir.Value]:
    """Return the loss function for a net with one output.

    Args:
        loss: a loss object, or a function ``(op, prediction, target)`` that returns one value per
            element.
        weighted: whether the model has an input with one weight per row.
        penalty: the penalty, or ``None``.
        weights: names of the weights that the penalty applies to.
    """

    def build(op: OpBuilder, prediction: ir.Value) -> ir.Value:
        reduction = "none" if weighted else "mean"
        reduced = dataclasses.replace(loss, reduction=reduction) if isinstance(loss, Loss) else loss
        dims = op.dims(prediction)
        if isinstance(reduced, Loss):
            (target,) = reduced.targets(prediction)
            t = op.input("target", target.dtype, list(target.dims))
            value = reduced.build(op, prediction, t)
        else:
            t = op.input("target", prediction.dtype or _LOSS_DTYPE, list(dims))
            value = reduced(op, prediction, t)
        if weighted:
            if op.rank(value) > 1:
                value = op.ReduceMean(value, list(range(1, op.rank(value))), keepdims=0)
            w = op.input(SAMPLE_WEIGHT, _LOSS_DTYPE, [dims[0]])
            value = op.Mul(value, op.cast(w, value.dtype))
        if op.rank(value):
            value = op.ReduceMean(value, keepdims=0)
        value = op.cast(value, _LOSS_DTYPE)
        if penalty is not None and weights:
            known = op.root.initializers
            value = op.Add(value, penalty.build(op, [known[n] for n in weights]))
        return value

    return build


@dataclasses.dataclass(frozen=True)
class Penalty:
    """``alpha (l1_ratio |w|_1 + (1 - l1_ratio) |w|^2 / 2)`` over all weights, without biases.

    It is part of the loss, so the learning rate scales its gradient too.
    """

    alpha: float
    l1_ratio: float

    @classmethod
    def of(cls, name: str | None, alpha: float, l1_ratio: float) -> Penalty | None:
        """Return the penalty with this name; ``None`` for no penalty."""
        if name is None:
            return None
        if name not in PENALTIES:
            raise PrepareError(f"unknown penalty: {name!r} {expected_one_of(name, PENALTIES)}")
        if not alpha >= 0 or not 0 <= l1_ratio <= 1:
            raise PrepareError(
                f"a penalty needs alpha >= 0 and l1_ratio in [0, 1], "
                f"got alpha={alpha} and l1_ratio={l1_ratio}"
            )
        ratio = {"l1": 1.0, "l2": 0.0}.get(name, float(l1_ratio))
        return cls(float(alpha), ratio) if alpha else None

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value:
        """Emit the sum over all weights, a float32 scalar."""
        terms = []
        for w in weights:
            if self.l1_ratio:
                size = op.ReduceSum(op.Abs(w), keepdims=0)
                terms.append(op.Mul(size, self.alpha * self.l1_ratio))
            if self.l1_ratio < 1:
                square = op.ReduceSum(op.Mul(w, w), keepdims=0)
                terms.append(op.Mul(square, self.alpha * (1 - self.l1_ratio) / 2))
        total = op.cast(terms[0], _LOSS_DTYPE)
        for term in terms[1:]:
            total = op.Add(total, op.cast(term, _LOSS_DTYPE))
        return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquaredError(MSE):
    """``(x - t)^2 / 2``: scikit-learn's squared error, with its factor of one half."""

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit half the mean with ReduceSumSquare: one node, and one for its gradient."""
        if self.reduction != "mean":
            return op.Mul(super().build(op, prediction, *targets), 0.5)
        check_same_rank(self, prediction, *targets)
        total = op.ReduceSumSquare(op.Sub(prediction, *targets), keepdims=0)
        sizes = op.static(prediction)
        if sizes is not None:
            return op.Mul(total, 0.5 / float(np.prod(sizes)))
        return op.Div(op.Mul(total, 0.5), op.count(prediction))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LogLikelihood(NLL):
    """``-log(p[label])`` of probabilities."""

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        floor = op.const(_MIN_PROBABILITY, prediction.dtype)
        return super().build(op, op.Log(op.Max(prediction, floor)), *targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SignedHinge(Hinge):
    """Hinge loss for targets of 0 and 1."""

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        return super().per_element(op, prediction, op.Sub(op.Mul(targets[0], 2.0), 1.0))


REGRESSION_LOSSES = {"squared_error": SquaredError, "absolute_error": L1, "huber": Huber}
MARGIN_LOSSES = ("hinge", "multi_margin")


def regression_loss(loss: Any) -> Any:
    """Return the loss object or function for the ``loss`` parameter of a regressor."""
    if isinstance(loss, str):
        if loss in REGRESSION_LOSSES:
            return REGRESSION_LOSSES[loss]()
        if loss.split(":")[0] not in LOSSES:
            raise unknown_name_error(loss, [*REGRESSION_LOSSES, *LOSSES], "loss")
    if isinstance(loss, str | Loss) or (isinstance(loss, type) and issubclass(loss, Loss)):
        return resolve(loss)[0].loss
    if callable(loss):
        return loss
    raise PrepareError(
        f"loss must be a name, a loss object or a function, got {loss!r}\n"
        "hint: onnxtrain.losses has the loss objects"
    )


def classification_loss(loss: Any, columns: int, kind: str) -> Any:
    """Return the loss object or function of a classifier whose net has ``columns`` outputs."""
    single = columns == 1
    if loss == "log_loss":
        if kind == "logits":
            return BCEWithLogits() if single else CrossEntropy(ignore_index=None)
        return BCE() if single else _LogLikelihood(ignore_index=None)
    if loss in MARGIN_LOSSES:
        return _SignedHinge() if single else MultiMargin()
    if isinstance(loss, str) and loss.split(":")[0] not in LOSSES:
        raise unknown_name_error(loss, ["log_loss", *MARGIN_LOSSES, *LOSSES], "loss")
    return regression_loss(loss)
