"""The graphs of a training run, each with its inputs and outputs listed by role.

A graph whose inputs and outputs are declared one by one, each with its role.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.artifacts.request import (
    GRAD_NORM,
    SCALE,
    BuildOptions,
    GradScaler,
    UpdateOptions,
    scalar,
    unscale,
)
from onnxtrain.autodiff.differentiate import raise_if_blocked
from onnxtrain.autodiff.gradients import GradientModel, lift
from onnxtrain.autodiff.selection import reaching
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, names_in
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify.dead_code import remove_dead
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.losses import Attached, attach_loss
from onnxtrain.manifest import ModelSpec, StateSpec, TensorSpec, WeightSpec
from onnxtrain.modes import running_statistics, sizes_above_one, to_evaluation, to_training
from onnxtrain.modes.mixed_precision import autocast
from onnxtrain.modes.randomness import portable_dropout
from onnxtrain.optim import clip_by_global_norm, clip_by_value, global_norm, moving_average
from onnxtrain.optim.vectors import apply_flattened
from onnxtrain.optimize.pipeline import rewrite_final, rewrite_fusions, rewrite_inputs
from onnxtrain.targets import Target, find

FILES = {
    "train": "training_model.onnx",
    "eval": "eval_model.onnx",
    "optimizer": "optimizer_model.onnx",
    "step": "step_model.onnx",
    "infer": "inference_model.onnx",
    "gradients": "gradient_model.onnx",
    "scalars": "scalar_model.onnx",
    "update": "update_model.onnx",
}
_NAMES = re.compile(
    rf"({'|'.join(f.removesuffix('.onnx') for f in FILES.values())})((?:\.[a-z0-9]+)*)\.onnx$"
)


def plain_name(file: str) -> str:
    """Return a model's file name without the prefix that it was saved with.

    >>> plain_name("net_step_model.x8.onnx")
    'step_model.x8.onnx'
    """
    match = _NAMES.search(file)
    return file if match is None else match[0]


def is_model_name(file: str, prefix: str) -> bool:
    """Return whether a file is called as models are that are saved with a prefix.

    >>> is_model_name("net_step_model.x8.onnx", "net_"), is_model_name("mine_model.onnx", "")
    (True, False)
    """
    return file.startswith(prefix) and _NAMES.match(file, len(prefix)) is not None


def model_key(spec: ModelSpec) -> str:
    """Return what a model is called among its like: its role, and what tells it from the plain one.

    >>> key_of(ModelSpec("step", "net_step_model.x8.onnx", (), ()))
    'step.x8'
    """
    match = _NAMES.search(spec.file)
    return spec.role + ("" if match is None else match[2])


class GraphSignature:
    """A graph under construction; the order of declarations is the order of the contract."""

    def __init__(self, role: str, model: ir.Model, op: OpBuilder) -> None:
        self.role, self.model, self.op = role, model, op
        self._inputs: list[tuple[ir.Value, str]] = []
        self._outputs: list[tuple[ir.Value, str, ir.Value | None]] = []
        self._named: set[str | None] = set()
        self._seen = [0, 0, 0]  # inputs, outputs and inputs of the graph whose names are known

    def declare(self, values: Sequence[ir.Value], role: str) -> None:
        """Declare values that are inputs of the graph already."""
        self._inputs += [(x, role) for x in values]

    def input(
        self, name: str, role: str, dtype: ir.DataType, dims: Sequence[int | str]
    ) -> ir.Value:
        """Declare a new input; its name gets ``.2``, ``.3`` ... if it is taken outside."""
        value = ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(dims))
        value.name = self._claim(name)
        self.declare([value], role)
        return value

    def output(
        self, name: str, role: str, value: ir.Value, feeds: ir.Value | None = None
    ) -> ir.Value:
        """Declare an output, a value of its own with this name."""
        out = self.op.Identity(value)
        shape, kind = value.shape, value.type
        out.name = self._claim(name)
        out.type, out.shape = kind, shape
        self._outputs.append((out, role, feeds))
        return out

    def _claim(self, wanted: str) -> str:
        """Return a free name; a value inside the graph that has it is renamed."""
        op = self.op
        outside, stored = self._outside(), self.model.graph.initializers
        name, n = wanted, 2
        while name in outside or name in stored:
            name, n = f"{wanted}.{n}", n + 1
        if name in op.names.taken:
            for node in self.model.graph.all_nodes():
                if node.name == name:
                    node.name = op.names.fresh(f"{name}.inner")
                for y in node.outputs:
                    if y.name == name:
                        y.name = op.names.fresh(f"{name}.inner")
        op.names.taken.add(name)
        return name

    def _outside(self) -> set[str | None]:
        """Return the names of inputs and outputs; those that are new since the last time are added.

        To gather all of them each time would take long: there may be thousands.
        """
        inner = self.model.graph.inputs
        first = self._seen
        new = [x for x, _ in self._inputs[first[0] :]]
        new += [y for y, _, _ in self._outputs[first[1] :]]
        new += inner[first[2] if first[2] <= len(inner) else 0 :]
        self._named.update(x.name for x in new)
        self._seen = [len(self._inputs), len(self._outputs), len(inner)]
        return self._named

    def replace_output(
        self, old: ir.Value, name: str, role: str, value: ir.Value, feeds: ir.Value
    ) -> None:
        """Put a value of the graph in the place of an output, under another name and role."""
        at = [y for y, _, _ in self._outputs].index(old)
        value.name = self._claim(name)
        self._outputs[at] = (value, role, feeds)

    def outputs_of(self, role: str) -> list[ir.Value]:
        """Return the outputs of a role, in the order of their declaration."""
        return [y for y, own, _ in self._outputs if own == role]

    def optimize(self, target: str | Target) -> None:
        """Simplify the graph and run the final passes."""
        self._set_ends()
        graph = self.model.graph
        names = [y.name for y in graph.outputs]
        rewrite_final(self.model, target, last=True)
        assert [y.name for y in graph.outputs] == names, "simplify keeps outputs"
        outputs = zip(graph.outputs, self._outputs, strict=True)
        self._outputs = [(y, role, feeds) for y, (_, role, feeds) in outputs]

    def sweep(self) -> None:
        """Drop what no output needs any more."""
        self._set_ends()
        remove_dead(self.model)

    def build(self, target: str | Target) -> tuple[onnx.ModelProto, ModelSpec]:
        """Simplify, serialise and describe the model."""
        self.optimize(target)
        return self.finish(target)

    def finish(self, target: str | Target) -> tuple[onnx.ModelProto, ModelSpec]:
        """Serialise and describe the model as it is."""
        self._set_ends()
        spec = ModelSpec(
            role=self.role,
            file=FILES[self.role],
            target=find(target).name,
            inputs=tuple(describe(x, role) for x, role in self._inputs),
            outputs=tuple(
                describe(y, role, None if feeds is None else feeds.name)
                for y, role, feeds in self._outputs
            ),
        )
        return finalize(self.model), spec

    def _set_ends(self) -> None:
        graph = self.model.graph
        graph.inputs.clear()
        graph.inputs.extend(x for x, _ in self._inputs)
        graph.outputs.clear()
        graph.outputs.extend(y for y, _, _ in self._outputs)
        graph.name = FILES[self.role].removesuffix(".onnx")


def describe(x: ir.Value, role: str, feeds: str | None = None) -> TensorSpec:
    """Return the entry of an input or output in the manifest."""
    dims = S.dims_of(x) or ()
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in dims)
    return TensorSpec(x.name or "", dtype_name(x.dtype), shape, role, feeds)


def dtype_name(dtype: ir.DataType | None) -> str:
    """Return the manifest's word for a type: numpy's.

    >>> dtype_name(ir.DataType.FLOAT)
    'float32'
    """
    if dtype is None:
        return "sequence"
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name


def dtype_from_name(name: str) -> ir.DataType:
    """Return the type that the manifest has a word for.

    >>> dtype_from_name("float32").name
    'FLOAT'
    """
    return ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper())]


_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
BuiltModel = tuple[onnx.ModelProto, ModelSpec]


@dataclasses.dataclass(frozen=True)
class DifferentiatedModel:
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

    def copy(self, role: str, target: str | Target) -> ModelCopy:
        """Return a copy to add nodes to."""
        return ModelCopy(self, role, target)


class ModelCopy:
    """A copy of :class:`Backward` with its values by kind."""

    def __init__(self, origin: DifferentiatedModel, role: str, target: str | Target) -> None:
        model = origin.model.clone()
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
        return unscale(self.op, self.gradients, *self.scale) if self.scale else self.gradients

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


def differentiate_loss(prepared: Prepared, options: BuildOptions) -> DifferentiatedModel:
    """Differentiate the loss in the mode asked for; the model is changed in place."""
    model, graph = prepared.model, prepared.graph
    repairs: list[str] = []
    if options.mode == "train":
        repairs += to_training(model, trainable=set(options.candidates))
    above_one = sizes_above_one(model)
    if options.precision.half is not None:
        rewrite_fusions(model, options.target)
        autocast(model, options.precision.half, target=options.target)
    inputs = list(graph.inputs)
    attached, rng, shown = _attach_losses(model, options)
    # The model's own outputs, unless asked for, keep no pass from rewriting what leads to them.
    requested_outputs = {
        attached.loss.name,
        *(y.name for y in attached.metrics.values()),
        *shown.values(),
    }
    graph.outputs[:] = [y for y in graph.outputs if y.name in requested_outputs]
    # Here passes merge and fold only constants that the loss and earlier passes added. With those
    # of the file, too, training graphs would differ from the ones that users have.
    unmarked = dataclasses.replace(prepared, constants=frozenset())
    made = GradientModel(unmarked, options.target, blocks=bool(options.recompute))
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
    extra = _outputs_by_name(graph, shown)
    results = [attached.loss, *attached.metrics.values(), *extra.values()]
    for x in chosen:
        gradient = gradients[x]
        gradient = op.zeros_like(x) if gradient is None else gradient
        gradient.shape = x.shape
        results.append(gradient)
    made.set_outputs([*results, *(b.new for b in statistics)])
    made.rewrite()
    return DifferentiatedModel(
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


def training_graph(origin: DifferentiatedModel, options: BuildOptions) -> BuiltModel:
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


def step_graph(
    origin: DifferentiatedModel, options: BuildOptions, state: Sequence[StateSpec]
) -> BuiltModel:
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


def eval_graph(model: ir.Model, options: BuildOptions, names: Sequence[str]) -> BuiltModel:
    """Loss and metrics of one batch, in evaluation mode."""
    graph = model.graph
    inputs = list(graph.inputs)
    attached, rng, shown = _attach_losses(model, options, evaluation=True)
    extra = _outputs_by_name(graph, shown)
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
) -> BuiltModel:
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
        scaled = unscale(op, gradients, slots[SCALE], factor)
    else:
        scaled = {n: op.Mul(g, op.cast(factor, g.dtype)) for n, g in gradients.items()}
    _update(signature, options, parameters, scaled, slots, lr, step)
    return signature.build(options.target)


def _update(
    signature: GraphSignature,
    options: UpdateOptions,
    parameters: dict[str, ir.Value],
    grads: dict[str, ir.Value],
    slots: dict[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> None:
    new, new_state = emit_update(signature.op, options, parameters, grads, slots, lr, step)
    for name, value in new.items():
        signature.output(f"{name}.out", "parameter", value, parameters[name])
    for name, slot in slots.items():
        signature.output(f"{name}.out", "state", new_state[name], slot)


def emit_update(
    op: OpBuilder,
    options: UpdateOptions,
    parameters: dict[str, ir.Value],
    grads: dict[str, ir.Value],
    slots: dict[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """Emit clipping, the optimizer and the average; return new parameters and new state."""
    guard = GradScaler(op, options.precision, slots, grads) if options.precision.scaled else None
    if guard is not None:
        step = guard.steps_done(step)
    if options.clip.norm is not None:
        grads = clip_by_global_norm(op, grads, options.clip.norm)
    if options.clip.value is not None:
        grads = clip_by_value(op, grads, options.clip.value)
    if op.target.prefers("few-operators"):
        apply = functools.partial(apply_flattened, options.optimizer)
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
    raise_if_blocked(list(graph), [x for x in candidates if x not in useful], [loss])
    if dead and options.chosen_by_user:
        raise PrepareError(
            f"no differentiable path to the loss from: {', '.join(dead)}\n"
            "hint: leave them out of `train`"
        )
    chosen = [x for x in candidates if x in useful]
    if not chosen:
        raise PrepareError("no parameter reaches the loss\nhint: look at `onnxtrain explain`")
    return chosen


def _attach_losses(
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


def _outputs_by_name(graph: ir.Graph, names: Mapping[str, str]) -> dict[str, ir.Value]:
    """Return outputs of the graph, whatever values they are by now."""
    known = {y.name: y for y in graph.outputs}
    return {n: known[name] for n, name in names.items()}


def _declare_batch(copy: ModelCopy) -> None:
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
