"""The graphs of a training run, each with its inputs and outputs listed by role."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.artifacts.options import GRAD_NORM, BuildOptions, UpdateOptions
from onnxtrain.artifacts.precision import SCALE, Guard, scalar, unscaled
from onnxtrain.artifacts.signature import GraphSignature, dtype_from_name
from onnxtrain.autodiff.differentiate import refuse_behind
from onnxtrain.autodiff.gradient_model import GradientModel, lift
from onnxtrain.autodiff.selection import reaching
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder, names_in
from onnxtrain.graph.modes import running_statistics, sizes_above_one, to_evaluation, to_training
from onnxtrain.graph.modes.autocast import autocast
from onnxtrain.graph.modes.randomness import portable_dropout
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET
from onnxtrain.losses import Attached, attach_loss
from onnxtrain.manifest import ModelSpec, StateSpec, WeightSpec
from onnxtrain.optim import (
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    moving_average,
)
from onnxtrain.optim.joined import apply_joined
from onnxtrain.passes.pipeline import rewrite_inputs, rewrite_spellings
from onnxtrain.targets import Target

_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
Finished = tuple[onnx.ModelProto, ModelSpec]


@dataclasses.dataclass(frozen=True)
class Backward:
    """Forward pass, loss and reverse sweep of one batch.

    The outputs of the graph are loss, metrics, extra outputs, gradients and new statistics, in this
    order; its inputs are those of the model, targets, parameters and buffers.
    """

    model: ir.Model
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    rng: str | None
    metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    changing: tuple[str, ...]
    """Those of ``buffers`` that a training step updates."""
    repairs: tuple[str, ...]
    scale: str | None = None
    """The input that the loss is scaled by, if it is."""
    above_one: tuple[str, ...] = ()
    """Products of sizes that a batch must have above 1."""

    def copy(self, role: str, target: str | Target) -> Copy:
        """Return a copy to add nodes to."""
        return Copy(self, role, target)


class Copy:
    """A copy of :class:`Backward` with its values by kind."""

    def __init__(self, origin: Backward, role: str, target: str | Target) -> None:
        model = origin.model.clone()
        model.meta.update(origin.model.meta)
        self.op = OpBuilder(model.graph, "step/", target=target)
        self.signature = GraphSignature(role, model, self.op)
        known = {x.name or "": x for x in model.graph.inputs}
        self.front = [known[n] for n in origin.inputs]
        self.targets = [known[n] for n in origin.targets]
        self.rng = [] if origin.rng is None else [known[origin.rng]]
        self.scale = [] if origin.scale is None else [known[origin.scale]]
        self.parameters = {n: known[n] for n in origin.parameters}
        self.buffers = {n: known[n] for n in origin.buffers}
        results = iter(list(model.graph.outputs))
        self.loss = next(results)
        self.metrics = {n: next(results) for n in origin.metrics}
        self.outputs = {n: next(results) for n in origin.outputs}
        self.gradients = {n: next(results) for n in origin.parameters}
        self.new_buffers = {n: next(results) for n in origin.changing}
        model.graph.outputs.clear()

    def unscaled(self) -> dict[str, ir.Value]:
        """Return the gradients of the loss itself."""
        return unscaled(self.op, self.gradients, *self.scale) if self.scale else self.gradients

    def report(self, norm_of: Mapping[str, ir.Value] | None) -> None:
        """Declare loss, metrics and the model's own outputs."""
        self.signature.output("loss", "loss", self.loss)
        for name, value in self.metrics.items():
            self.signature.output(name, "metric", value)
        if norm_of is not None:
            norm = global_norm(self.op, norm_of)
            self.signature.output(GRAD_NORM, "metric", norm)
        for name, value in self.outputs.items():
            self.signature.output(name, "output", value)

    def declare_new_buffers(self) -> None:
        """Declare the updated statistics."""
        for name, value in self.new_buffers.items():
            self.signature.output(f"{name}.out", "buffer", value, self.buffers[name])


def backward(model: ir.Model, options: BuildOptions) -> Backward:
    """Differentiate the loss in the mode asked for; ``model`` is used up."""
    graph = model.graph
    repairs: list[str] = []
    if options.mode == "train":
        repairs += to_training(model, trainable=set(options.candidates))
    above_one = sizes_above_one(model)
    if options.precision.half is not None:
        rewrite_spellings(model, options.target)
        autocast(model, options.precision.half, target=options.target)
    inputs = list(graph.inputs)
    attached, rng, shown = _attach(model, options)
    # The model's own outputs, unless asked for, keep no pass from rewriting what leads to them.
    asked = {attached.loss.name, *(y.name for y in attached.metrics.values()), *shown.values()}
    graph.outputs[:] = [y for y in graph.outputs if y.name in asked]
    made = GradientModel(model, options.target, blocks=bool(options.recompute))
    chosen = _reaching_parameters(graph, options, attached.loss)
    op = made.op
    statistics = running_statistics(model, op)
    changing = [b.old for b in statistics]
    still = [graph.initializers[n] for n in options.buffers if n in graph.initializers]
    buffers = [*changing, *(x for x in still if x not in changing)]
    made.lift([*chosen, *buffers])
    scale = [op.input(SCALE, _FLOAT, [1])] if options.precision.scaled else []
    dtype = attached.loss.dtype
    seed = op.cast(scalar(op, *scale), dtype) if scale else op.const(1.0, dtype)
    gradients = made.differentiate(
        {attached.loss: seed}, chosen, recompute=options.recompute, batch=[*inputs, *rng]
    )
    extra = _by_name(graph, shown)
    results = [attached.loss, *attached.metrics.values(), *extra.values()]
    for x in chosen:
        gradient = gradients[x]
        gradient = op.zeros_like(x) if gradient is None else gradient
        gradient.shape = x.shape
        results.append(gradient)
    made.set_outputs([*results, *(b.new for b in statistics)])
    made.rewrite()
    return Backward(
        model=model,
        inputs=_names(inputs),
        targets=_names(attached.targets),
        rng=rng[0].name if rng else None,
        metrics=tuple(attached.metrics),
        outputs=tuple(extra),
        parameters=_names(chosen),
        buffers=_names(buffers),
        changing=_names(changing),
        repairs=tuple(repairs),
        scale=scale[0].name if scale else None,
        above_one=above_one,
    )


def training_graph(origin: Backward, options: BuildOptions) -> Finished:
    """Loss and accumulated gradients of one batch."""
    copy = origin.copy("train", options.target)
    op, signature = copy.op, copy.signature
    _declare_batch(copy)
    signature.declare(list(copy.parameters.values()), "parameter")
    signature.declare(list(copy.buffers.values()), "buffer")
    signature.declare(copy.scale, "state")
    old = {
        n: signature.input(
            f"{n}_grad.accumulation.buffer", "accumulator", _dtype(g), op.static(g) or ()
        )
        for n, g in copy.gradients.items()
    }
    reset = signature.input("lazy_reset_grad", "reset", _BOOL, [1])
    signature.declare(copy.rng, "rng")
    flag = op.Reshape(reset, op.const([]))
    copy.report(copy.unscaled() if GRAD_NORM in options.metrics else None)
    for name, g in copy.gradients.items():
        total = op.Where(flag, g, op.Add(old[name], g))
        signature.output(f"{name}_grad.accumulation.out", "gradient", total, old[name])
    copy.declare_new_buffers()
    return signature.build(options.target)


def step_graph(origin: Backward, options: BuildOptions, state: Sequence[StateSpec]) -> Finished:
    """One whole step: loss, new parameters, new state, new buffers."""
    copy = origin.copy("step", options.target)
    signature = copy.signature
    _declare_batch(copy)
    lr = signature.input("learning_rate", "lr", _FLOAT, [1])
    step = signature.input("step", "step", _step_type(options), [1])
    signature.declare(copy.rng, "rng")
    signature.declare(list(copy.parameters.values()), "parameter")
    signature.declare(list(copy.buffers.values()), "buffer")
    signature.declare(copy.scale, "state")
    given = {x.name or "": x for x in copy.scale}
    slots = given | _state_inputs(signature, [s for s in state if s.name not in given])
    gradients = copy.unscaled()
    copy.report(gradients if GRAD_NORM in options.metrics else None)
    _update(signature, options, copy.parameters, gradients, slots, lr, step)
    copy.declare_new_buffers()
    return signature.build(options.target)


def eval_graph(model: ir.Model, options: BuildOptions, names: Sequence[str]) -> Finished:
    """Loss and metrics of one batch, in evaluation mode."""
    graph = model.graph
    inputs = list(graph.inputs)
    attached, rng, shown = _attach(model, options, evaluation=True)
    extra = _by_name(graph, shown)
    op = OpBuilder(graph, "eval/", target=options.target)
    signature = GraphSignature("eval", model, op)
    signature.declare(inputs, "input")
    signature.declare(attached.targets, "target")
    for role, wanted in (("parameter", names), ("buffer", options.buffers)):
        values = [graph.initializers[n] for n in wanted if n in graph.initializers]
        lift(graph, values)
        signature.declare(values, role)
    signature.declare(rng, "rng")
    graph.outputs.clear()
    signature.output("loss", "loss", attached.loss)
    for name, value in attached.metrics.items():
        signature.output(name, "metric", value)
    for name, value in extra.items():
        signature.output(name, "output", value)
    return signature.build(options.target)


def optimizer_graph(
    options: UpdateOptions, weights: Sequence[WeightSpec], state: Sequence[StateSpec]
) -> Finished:
    """New parameters and state from accumulated gradients."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="optimizer")
    op = OpBuilder(graph, "step/", target=options.target)
    signature = GraphSignature("optimizer", ir.Model(graph, ir_version=IR_VERSION), op)
    lr = signature.input("learning_rate", "lr", _FLOAT, [1])
    step = signature.input("step", "step", _step_type(options), [1])
    scale = signature.input("grad_scale", "grad_scale", _FLOAT, [1])

    def inputs(suffix: str, role: str) -> dict[str, ir.Value]:
        return {
            w.name: signature.input(w.name + suffix, role, dtype_from_name(w.dtype), w.shape)
            for w in weights
        }

    parameters, gradients = inputs("", "parameter"), inputs("_grad", "gradient")
    slots = _state_inputs(signature, state)
    factor = scalar(op, scale)
    if options.precision.scaled:
        scaled = unscaled(op, gradients, slots[SCALE], factor)
    else:
        scaled = {n: op.Mul(g, op.cast(factor, g.dtype)) for n, g in gradients.items()}
    _update(signature, options, parameters, scaled, slots, lr, step)
    return signature.build(options.target)


def _update(
    signature: GraphSignature, options: UpdateOptions, parameters: dict[str, ir.Value],
    grads: dict[str, ir.Value], slots: dict[str, ir.Value], lr: ir.Value, step: ir.Value,
) -> None:  # fmt: skip
    new, new_state = emit_update(signature.op, options, parameters, grads, slots, lr, step)
    for name, value in new.items():
        signature.output(f"{name}.out", "parameter", value, parameters[name])
    for name, slot in slots.items():
        signature.output(f"{name}.out", "state", new_state[name], slot)


def emit_update(
    op: OpBuilder, options: UpdateOptions, parameters: dict[str, ir.Value],
    grads: dict[str, ir.Value], slots: dict[str, ir.Value], lr: ir.Value, step: ir.Value,
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:  # fmt: skip
    """Emit clipping, the optimizer and the average; return new parameters and new state."""
    guard = Guard(op, options.precision, slots, grads) if options.precision.scaled else None
    if guard is not None:
        step = guard.steps_done(step)
    if options.clip.norm is not None:
        grads = clip_by_global_norm(op, grads, options.clip.norm)
    if options.clip.value is not None:
        grads = clip_by_value(op, grads, options.clip.value)
    if op.target.prefers("few-operators"):
        apply = functools.partial(apply_joined, options.optimizer)
    else:
        apply = options.optimizer.apply
    new, new_state = apply(op, parameters, grads, slots, lr, step)
    if options.ema is not None:
        averages = {n: slots[f"{n}.ema"] for n in parameters}
        averaged = moving_average(op, averages, new, options.ema)
        new_state.update({f"{n}.ema": v for n, v in averaged.items()})
    if guard is not None:
        new, new_state = guard.keep(parameters, new), guard.keep(slots, new_state)
        new_state.update(guard.new_state())
    return new, new_state


def _reaching_parameters(graph: ir.Graph, options: BuildOptions, loss: ir.Value) -> list[ir.Value]:
    useful = reaching(graph, [loss], refused=True)
    candidates = [graph.initializers[n] for n in options.candidates if n in graph.initializers]
    dead = [x.name or "" for x in candidates if x not in useful]
    refuse_behind(list(graph), [x for x in candidates if x not in useful], [loss])
    if dead and options.chosen_by_user:
        raise PrepareError(
            f"no differentiable path to the loss from: {', '.join(dead)}\n"
            "hint: leave them out of `train`"
        )
    chosen = [x for x in candidates if x in useful]
    if not chosen:
        raise PrepareError("no parameter reaches the loss\nhint: look at `onnxtrain explain`")
    return chosen


def _attach(
    model: ir.Model, options: BuildOptions, *, evaluation: bool = False
) -> tuple[Attached, list[ir.Value], dict[str, str]]:
    """Add the loss and make randomness an input; return that and the names of extra outputs too."""
    graph = model.graph
    rewrite_inputs(model, options.target)
    attached = attach_loss(
        model,
        options.loss,
        metrics=options.graph_metrics,
        outputs=options.outputs,
        target=options.target,
        differentiated=not evaluation,
    )
    # As outputs they keep their names when something is put in their place.
    graph.outputs.extend(y for y in attached.outputs.values() if y not in list(graph.outputs))
    names = {n: y.name or "" for n, y in attached.outputs.items()}
    if evaluation:
        to_evaluation(model)
    before = set(graph.inputs)
    if options.randomness == "portable":
        taken, name = names_in(graph), "rng"
        while name in taken:
            name += "_"
        portable_dropout(model, rng_input_name=name, target=options.target)
    return attached, [x for x in graph.inputs if x not in before], names


def _by_name(graph: ir.Graph, names: Mapping[str, str]) -> dict[str, ir.Value]:
    """Return outputs of the graph, whatever values they are by now."""
    known = {y.name: y for y in graph.outputs}
    return {n: known[name] for n, name in names.items()}


def _declare_batch(copy: Copy) -> None:
    copy.signature.declare(copy.front, "input")
    copy.signature.declare(copy.targets, "target")


def _state_inputs(signature: GraphSignature, state: Sequence[StateSpec]) -> dict[str, ir.Value]:
    return {
        s.name: signature.input(s.name, "state", dtype_from_name(s.dtype), s.shape) for s in state
    }


def _dtype(x: ir.Value) -> ir.DataType:
    assert x.dtype is not None
    return x.dtype


def _step_type(options: UpdateOptions) -> ir.DataType:
    return ir.DataType.INT32 if options.target.lacks("int64") else _INT64


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(x.name or "" for x in values)
