"""The graphs of a training run, each with its inputs and outputs listed by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.autodiff.gradients import lift
from onnxtrain.autodiff.selection import reaching
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.finish import finish
from onnxtrain.graph.modes import Buffer, running_statistics, to_evaluation, to_training
from onnxtrain.graph.randomness import portable_dropout
from onnxtrain.graph.simplify import simplify
from onnxtrain.losses import Attached, attach_loss
from onnxtrain.manifest import ModelSpec, StateSpec, TensorSpec
from onnxtrain.optim import (
    Optimizer,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    moving_average,
)

if TYPE_CHECKING:
    from onnxtrain.artifacts.build import Clip

FILES = {
    "train": "training_model.onnx",
    "eval": "eval_model.onnx",
    "optimizer": "optimizer_model.onnx",
    "step": "step_model.onnx",
    "infer": "inference_model.onnx",
}
_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was asked for, resolved."""

    loss: Any
    optimizer: Optimizer
    metrics: tuple[Any, ...]
    outputs: tuple[str, ...]
    candidates: tuple[str, ...]
    chosen_by_user: bool
    buffers: tuple[str, ...]
    mode: str
    clip: Clip
    ema: float | None
    target: str
    randomness: str


@dataclasses.dataclass
class Built:
    """A graph under construction; inputs and outputs are declared in the order of the contract."""

    role: str
    model: ir.Model
    target: str
    inputs: list[tuple[ir.Value, str]] = dataclasses.field(default_factory=list)
    outputs: list[tuple[ir.Value, str, str | None]] = dataclasses.field(default_factory=list)
    parameters: list[str] = dataclasses.field(default_factory=list)
    buffers: list[str] = dataclasses.field(default_factory=list)
    repairs: list[str] = dataclasses.field(default_factory=list)
    loss_name: str = ""

    def finished(self) -> tuple[onnx.ModelProto, ModelSpec]:
        """Simplify, serialise and describe the model."""
        graph = self.model.graph
        graph.inputs.clear()
        graph.inputs.extend(x for x, _ in self.inputs)
        graph.outputs.clear()
        graph.outputs.extend(y for y, _, _ in self.outputs)
        graph.name = FILES[self.role].removesuffix(".onnx")
        proto = finish(simplify(self.model))
        spec = ModelSpec(
            role=self.role,
            file=FILES[self.role],
            target=self.target,
            inputs=tuple(_spec(x, role) for x, role in self.inputs),
            outputs=tuple(_spec(y, role, feeds) for y, role, feeds in self.outputs),
        )
        return proto, spec


def training_graph(model: ir.Model, plan: Plan) -> Built:
    """Loss and accumulated gradients of one batch."""
    built, op, attached, buffers, grads = _backward(model, plan, "train")
    old, new = {}, {}
    for name, g in grads.items():
        old[name] = _value(f"{name}_grad.accumulation.buffer", g.type, g.shape)
        built.inputs.append((old[name], "accumulator"))
    reset = _value("lazy_reset_grad", ir.TensorType(ir.DataType.BOOL), ir.Shape([1]))
    built.inputs.append((reset, "reset"))
    _rng(built, model)
    flag = op.Reshape(reset, op.const([]))
    for name, g in grads.items():
        new[name] = op.Where(flag, g, op.Add(old[name], g))
    _report(built, op, attached, plan, grads)
    for name, g in new.items():
        _output(built, op, g, f"{name}_grad.accumulation.out", "gradient", old[name].name)
    _new_buffers(built, op, buffers)
    return built


def step_graph(
    model: ir.Model, plan: Plan, names: Sequence[str], state: Sequence[StateSpec]
) -> Built:
    """One whole step: loss, new parameters, new state, new buffers."""
    built, op, attached, buffers, grads = _backward(model, plan, "step", split=True)
    assert list(grads) == list(names)
    parameters = {n: x for (x, role) in built.inputs if role == "parameter" for n in [x.name or ""]}
    lr = _value("learning_rate", ir.TensorType(_FLOAT), ir.Shape([1]))
    step = _value("step", ir.TensorType(_step_type(plan)), ir.Shape([1]))
    slots = _state_inputs(state)
    front = [i for i in built.inputs if i[1] in ("input", "target")]
    back = [i for i in built.inputs if i[1] not in ("input", "target")]
    built.inputs = [*front, (lr, "lr"), (step, "step")]
    _rng(built, model)
    built.inputs += [*back, *((v, "state") for v in slots.values())]
    _report(built, op, attached, plan, grads)
    _update(built, op, plan, parameters, grads, slots, lr, step)
    _new_buffers(built, op, buffers)
    return built


def eval_graph(model: ir.Model, plan: Plan, names: Sequence[str]) -> Built:
    """Loss and metrics of one batch, in evaluation mode."""
    to_evaluation(model)
    attached = attach_loss(model, plan.loss, metrics=_graph_metrics(plan), outputs=plan.outputs)
    built = Built("eval", model, plan.target)
    graph = model.graph
    _user_inputs(built, attached)
    values = [graph.initializers[n] for n in names if n in graph.initializers]
    statistics = [
        graph.initializers[n] for n in plan.buffers if n in graph.initializers and n not in names
    ]
    _lift(built, values, "parameter")
    _lift(built, statistics, "buffer")
    op = OpBuilder(graph, "eval/", target=plan.target)
    _report(built, op, attached, plan, None)
    return built


def optimizer_graph(
    plan: Plan, arrays: Mapping[str, np.ndarray], state: Sequence[StateSpec]
) -> Built:
    """New parameters and state from accumulated gradients."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="optimizer")
    model = ir.Model(graph, ir_version=10)
    built = Built("optimizer", model, plan.target)
    op = OpBuilder(graph, "update/", target=plan.target)
    lr = _value("learning_rate", ir.TensorType(_FLOAT), ir.Shape([1]))
    step = _value("step", ir.TensorType(_step_type(plan)), ir.Shape([1]))
    scale = _value("grad_scale", ir.TensorType(_FLOAT), ir.Shape([1]))
    kinds = {n: ir.TensorType(ir.DataType.from_numpy(a.dtype)) for n, a in arrays.items()}
    parameters = {n: _value(n, kinds[n], ir.Shape(a.shape)) for n, a in arrays.items()}
    grads = {n: _value(f"{n}_grad", kinds[n], ir.Shape(a.shape)) for n, a in arrays.items()}
    slots = _state_inputs(state)
    built.inputs = [(lr, "lr"), (step, "step"), (scale, "grad_scale")]
    built.inputs += [(v, "parameter") for v in parameters.values()]
    built.inputs += [(v, "gradient") for v in grads.values()]
    built.inputs += [(v, "state") for v in slots.values()]
    for value, _ in built.inputs:
        op.names.taken.add(value.name or "")
    factor = op.Reshape(scale, op.const([]))
    scaled = {n: op.Mul(g, op.cast(factor, g.dtype)) for n, g in grads.items()}
    _update(built, op, plan, parameters, scaled, slots, lr, step)
    return built


def _backward(
    model: ir.Model, plan: Plan, role: str, *, split: bool = False
) -> tuple[Built, OpBuilder, Attached, list[Buffer], dict[str, ir.Value]]:
    """Forward pass in the mode asked for, loss, and the reverse sweep."""
    del split
    built = Built(role, model, plan.target)
    if plan.mode == "train":
        built.repairs += to_training(model, trainable=set(plan.candidates))
    attached = attach_loss(model, plan.loss, metrics=_graph_metrics(plan), outputs=plan.outputs)
    graph = model.graph
    if plan.randomness == "portable":
        portable_dropout(model, rng_input_name="rng")
    useful = reaching(graph, [attached.loss])
    chosen = [graph.initializers[n] for n in plan.candidates if n in graph.initializers]
    dead = [x.name or "" for x in chosen if x not in useful]
    if dead and plan.chosen_by_user:
        raise PrepareError(
            f"no differentiable path to the loss from: {', '.join(dead)}\nhint: leave them out of `train`"
        )
    chosen = [x for x in chosen if x in useful]
    if not chosen:
        raise PrepareError("no parameter reaches the loss\nhint: look at `onnxtrain explain`")
    op = OpBuilder(graph, "grad/", target=plan.target)
    buffers = running_statistics(model, op)
    _user_inputs(built, attached)
    _lift(built, chosen, "parameter")
    changing = {b.old for b in buffers}
    still = [graph.initializers[n] for n in plan.buffers if n in graph.initializers]
    _lift(built, [*(b.old for b in buffers), *(x for x in still if x not in changing)], "buffer")
    built.parameters = [x.name or "" for x in chosen]
    built.buffers = [x.name or "" for x, r in built.inputs if r == "buffer"]
    built.loss_name = attached.name
    seed = op.const(1.0, attached.loss.dtype)
    found = differentiate(op, {attached.loss: seed}, chosen)
    grads = {}
    for x in chosen:
        g = found[x]
        g = op.zeros_like(x) if g is None else g
        grads[x.name or ""] = g
        g.shape = x.shape
    return built, op, attached, buffers, grads


def _update(
    built: Built, op: OpBuilder, plan: Plan, parameters: dict[str, ir.Value], grads: dict[str, ir.Value],
    slots: dict[str, ir.Value], lr: ir.Value, step: ir.Value,
) -> None:  # fmt: skip
    if plan.clip.norm is not None:
        grads = clip_by_global_norm(op, grads, plan.clip.norm)
    if plan.clip.value is not None:
        grads = clip_by_value(op, grads, plan.clip.value)
    own = {n: v for n, v in slots.items() if not n.endswith(".ema")} if plan.ema else slots
    new, new_state = plan.optimizer.apply(op, parameters, grads, own, lr, step)
    if plan.ema is not None:
        averages = {n: slots[f"{n}.ema"] for n in parameters}
        new_state.update(
            {f"{n}.ema": v for n, v in moving_average(op, averages, new, plan.ema).items()}
        )
    for name, value in new.items():
        _output(built, op, value, f"{name}.out", "parameter", name)
    for name in slots:
        _output(built, op, new_state[name], f"{name}.out", "state", name)


def _report(
    built: Built,
    op: OpBuilder,
    attached: Attached,
    plan: Plan,
    grads: Mapping[str, ir.Value] | None,
) -> None:
    """Declare loss, metrics and the model's own outputs."""
    _output(built, op, attached.loss, "loss", "loss")
    for name, value in attached.metrics.items():
        _output(built, op, value, name, "metric")
    if "grad_norm" in plan.metrics and grads is not None:
        _output(built, op, global_norm(op, grads), "grad_norm", "metric")
    known = {y.name: y for y in built.model.graph.outputs}
    for name in plan.outputs:
        built.outputs.append((known[name], "output", None))


def _graph_metrics(plan: Plan) -> tuple[Any, ...]:
    return tuple(m for m in plan.metrics if m != "grad_norm")


def _new_buffers(built: Built, op: OpBuilder, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        _output(built, op, buffer.new, f"{buffer.name}.out", "buffer", buffer.name)


def _user_inputs(built: Built, attached: Attached) -> None:
    targets = set(attached.targets)
    for x in built.model.graph.inputs:
        if x.name == "rng":
            continue
        built.inputs.append((x, "target" if x in targets else "input"))


def _rng(built: Built, model: ir.Model) -> None:
    for x in model.graph.inputs:
        if x.name == "rng":
            built.inputs.append((x, "rng"))


def _lift(built: Built, values: Sequence[ir.Value], role: str) -> None:
    lift(built.model.graph, values)
    built.inputs += [(x, role) for x in values]


def _state_inputs(state: Sequence[StateSpec]) -> dict[str, ir.Value]:
    return {
        s.name: _value(s.name, ir.TensorType(ir.DataType[s.dtype.upper()]), ir.Shape(s.shape))
        for s in state
    }


def _step_type(plan: Plan) -> ir.DataType:
    return ir.DataType.INT32 if plan.target == "webgpu" else _INT64


def _value(name: str, type_: Any, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=type_, shape=shape)


def _output(
    built: Built, op: OpBuilder, value: ir.Value, name: str, role: str, feeds: str | None = None
) -> None:
    out = op.Identity(value)
    if name in op.names.taken:
        for known in built.model.graph.outputs:
            if known.name == name:
                known.name = op.names.fresh(f"{name}.model")
                break
    op.names.taken.add(name)
    out.name, out.type, out.shape = name, value.type, value.shape
    built.outputs.append((out, role, feeds))


def _spec(x: ir.Value, role: str, feeds: str | None = None) -> TensorSpec:
    assert x.dtype is not None
    dims = S.dims_of(x)
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in dims or ())
    return TensorSpec(x.name or "", x.dtype.name.lower(), shape, role, feeds)
