"""A whole epoch as one ONNX model: a Loop whose body is a training step.

A step of a small net takes less time than the call that runs it. So the loop over batches is in
the graph: it gathers its rows by a given order, and carries parameters and optimizer state along.
Parameters of one dtype lie in one vector, so that the optimizer has one update to do, not one per
layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.graphs import Backward, Copy, backward
from onnxtrain.artifacts.options import BuildOptions
from onnxtrain.autodiff.selection import batch_statistics
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.finish import finish
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET
from onnxtrain.graph.simplify import simplify
from onnxtrain.optim import SGD, Optimizer
from onnxtrain.optim.packing import Pack, alike

_INT64, _FLOAT, _BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL

LossFunction = Callable[..., ir.Value]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """A model that trains for one epoch, and what is in it."""

    model: onnx.ModelProto
    packs: tuple[Pack, ...]
    state: dict[str, tuple[tuple[int, ...], np.dtype[Any], float]]
    """Shape, type and start of each state tensor."""
    buffers: tuple[str, ...]
    targets: tuple[str, ...]
    inputs: tuple[str, ...]
    random: bool

    @property
    def carried(self) -> list[str]:
        """Names of what goes from step to step."""
        return [*(p.name for p in self.packs), *self.state, *self.buffers]

    @property
    def parameters(self) -> list[str]:
        """Names of all trained parameters."""
        return [n for p in self.packs for n in p.members]


def epoch_model(
    base: ir.Model,
    loss: LossFunction,
    optimizer: Optimizer,
    parameters: Sequence[str],
    *,
    chosen_by_user: bool,
    rows: int | None = None,
) -> Epoch:
    """Build the model of an epoch.

    Args:
        base: a net in the normal form, with one output; it is not changed.
        loss: a function over the builder that adds its targets as inputs and gives a scalar.
        optimizer: makes the updates.
        parameters: names of the initializers to train.
        chosen_by_user: whether each of them must reach the loss.
        rows: the size of every batch, if ``base`` has it as a fixed size; sizes are constants then.
    """
    statistics = batch_statistics(base.graph)
    options = BuildOptions(
        loss=loss,
        optimizer=optimizer,
        candidates=tuple(parameters),
        chosen_by_user=chosen_by_user,
        buffers=tuple(n for n, x in base.graph.initializers.items() if x in statistics),
        mode="train",
        randomness="portable",
    )
    origin = backward(base.clone(), options)
    copy = origin.copy("step", "cpu")
    packs = _packs(copy, optimizer)
    return _Looping(origin, copy, packs, optimizer, rows).build()


def _packs(copy: Copy, optimizer: Optimizer) -> list[Pack]:
    shapes = {n: tuple(copy.op.static(x) or ()) for n, x in copy.parameters.items()}
    dtypes = {n: x.dtype.numpy() for n, x in copy.parameters.items() if x.dtype is not None}
    # Plain descent is two nodes: less than it takes to put the parameters together.
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
        for names in alike(optimizer, dtypes)
    ]


class _Looping:
    """The pieces of the loop while it is put together."""

    def __init__(
        self,
        origin: Backward,
        copy: Copy,
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
        changing = [n for n in copy.buffers if n in copy.new_buffers]
        results = [copy.loss, *new.values(), *(new_state[k] for k in slots)]
        results += [copy.new_buffers[n] for n in changing]
        for y in results:
            out = op.Identity(y)
            out.type, out.shape = y.type, y.shape
            graph.outputs.append(out)
        carried = [*vectors.values(), *slots.values(), *(copy.buffers[n] for n in changing)]
        step_inputs = [*copy.front, *copy.targets, *copy.rng, lr, step, *carried]
        still = [x for n, x in copy.buffers.items() if n not in changing]
        graph.inputs.clear()
        graph.inputs.extend([*step_inputs, *still])
        names = [x.name or "" for x in graph.inputs]
        work = simplify(ir.Model(graph, ir_version=IR_VERSION))
        inner = dict(zip(names, work.graph.inputs, strict=True))
        model = self._loop(work.graph, inner, [x.name or "" for x in carried], still)
        return Epoch(
            model=model,
            packs=tuple(self.packs),
            state=self.state,
            buffers=tuple(changing),
            targets=tuple(x.name or "" for x in copy.targets),
            inputs=tuple(x.name or "" for x in copy.front),
            random=bool(copy.rng),
        )

    def _unpack(self, pack: Pack) -> ir.Value:
        """Make the vector an input of the step and let the parameters be parts of it."""
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
        still: Sequence[ir.Value],
    ) -> onnx.ModelProto:
        """Wrap the step in a Loop that takes its batches from the whole data."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="epoch")
        outer = OpBuilder(graph, "epoch/")
        copy = self.copy
        whole = {
            x.name or "": _outside(outer, inner, x.name or "", whole=True)
            for x in (*copy.front, *copy.targets)
        }
        places = ["batches", self.rows] if self.rows is not None else ["rows"]
        order = outer.input("epoch/order", _INT64, places)
        batches = outer.input("epoch/batches", _INT64, [])
        rates = outer.input("epoch/rates", _FLOAT, ["batches"])
        before = outer.input("epoch/steps_before", _INT64, [])
        seed = [outer.input("epoch/seed", _FLOAT, [1])] if copy.rng else []
        starts = [_outside(outer, inner, name) for name in carried]
        for x in still:
            inner[x.name or ""].replace_all_uses_with(_outside(outer, inner, x.name or ""))

        op = OpBuilder(body, "batch/", before=next(iter(body), None))
        index, going = op.input("batch/index", _INT64, []), op.input("batch/going", _BOOL, [])
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
        body.inputs.extend([index, going, *(inner[n] for n in carried)])
        body.outputs.clear()
        body.outputs.extend([op.Identity(going), *results, loss])
        body.name = "step"
        body.opset_imports.clear()
        _append_loop(graph, batches, starts, body)
        return finish(ir.Model(graph, ir_version=IR_VERSION))

    def _rows_of(
        self, outer: OpBuilder, op: OpBuilder, order: ir.Value, index: ir.Value
    ) -> ir.Value:
        """Return the numbers of the rows of one batch."""
        if self.rows is not None:
            return op.Gather(order, index, axis=0)
        rows = outer.input("epoch/rows_per_batch", _INT64, [1])
        start = op.Mul(index, rows)
        return op.Slice(order, start, op.Add(start, rows))


def _outside(
    outer: OpBuilder, inner: Mapping[str, ir.Value], name: str, *, whole: bool = False
) -> ir.Value:
    """Make an input of the epoch for one of the step; ``whole``: with all rows of the data."""
    x = inner[name]
    assert x.dtype is not None
    assert x.shape is not None
    dims = [d if isinstance(d, int) else str(d.value) for d in x.shape]
    return outer.input(f"epoch/{name}", x.dtype, ["rows", *dims[1:]] if whole else dims)


def _append_loop(
    graph: ir.Graph, count: ir.Value, starts: Sequence[ir.Value], body: ir.Graph
) -> None:
    """Append the Loop; its outputs, the losses last, are those of the graph."""
    loop = ir.Node(
        "",
        "Loop",
        [count, None, *starts],
        attributes=[ir.AttrGraph("body", body)],
        num_outputs=len(starts) + 1,
        version=OPSET,
    )
    graph.append(loop)
    loop.name = "epoch/loop"
    *ends, losses = loop.outputs
    for end, start in zip(ends, starts, strict=True):
        end.name = f"{start.name}.out"
        end.type, end.shape = start.type, start.shape
    losses.name, losses.type = "epoch/losses", ir.TensorType(_FLOAT)
    losses.shape = ir.Shape(["batches"])
    graph.outputs.extend(loop.outputs)


def _replace_by_scalar(op: OpBuilder, x: ir.Value, scalar: ir.Value) -> None:
    """Put a scalar in the place of ``x [1]``; nodes that make a scalar of it are not needed."""
    for node, _ in list(x.uses()):
        if node.op_type == "Reshape" and node.outputs[0].shape == ir.Shape([]):
            node.outputs[0].replace_all_uses_with(scalar)
            op.graph.remove(node, safe=True)
    if x.uses():
        x.replace_all_uses_with(op.Reshape(scalar, [1]))
