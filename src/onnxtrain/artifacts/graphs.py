"""Build the graphs of a training run, each with its inputs and outputs listed by role.

``build`` differentiates the loss once (:func:`differentiate_loss`). Each of :func:`training_graph`
(accumulates gradients), :func:`step_graph` (a whole training step) and, in ``update.py``,
``gradient_graph`` starts from a copy of the result. :func:`eval_graph` starts from the forward
pass, :func:`optimizer_graph` from an empty graph, :func:`inference_model` from the user's model.

The file in order: names of the model files; :class:`GraphSignature`, which declares inputs and
outputs and finishes a graph as :class:`BuiltModel`; the differentiated model and its copies; the
graphs; the update that several of them contain.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.build_options import GRAD_NORM, BuildOptions, Selection
from onnxtrain.artifacts.precision import SCALE, GradScaler, to_scalar, unscale
from onnxtrain.autodiff.differentiate import raise_if_blocked
from onnxtrain.autodiff.gradients import GradientModel, lift
from onnxtrain.autodiff.selection import reaching
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, names_in
from onnxtrain.graph.io.external_data import STORED_TENSOR, detach_weights
from onnxtrain.graph.io.writer import finalize, strip_traces
from onnxtrain.graph.simplify.dead_code import remove_dead
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, NEWEST_IR, OPSET
from onnxtrain.losses import Attached, attach_loss
from onnxtrain.losses.attach import Compared
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
    """Return the file name of a model without the prefix of :meth:`Artifacts.save`.

    >>> plain_name("net_step_model.x8.onnx")
    'step_model.x8.onnx'
    """
    match = _NAMES.search(file)
    return file if match is None else match[0]


def is_model_name(file: str, prefix: str) -> bool:
    """Return whether a file name is one that :meth:`Artifacts.save` gives to a model.

    >>> is_model_name("net_step_model.x8.onnx", "net_"), is_model_name("mine_model.onnx", "")
    (True, False)
    """
    return file.startswith(prefix) and _NAMES.match(file, len(prefix)) is not None


def model_key(spec: ModelSpec) -> str:
    """Return the key of a model in ``Artifacts.models``: its role and the suffix of its file.

    >>> model_key(ModelSpec("step", "net_step_model.x8.onnx", (), ()))
    'step.x8'
    """
    match = _NAMES.search(spec.file)
    return spec.role + ("" if match is None else match[2])


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A finished graph and its entry in the manifest."""

    model: ir.Model
    spec: ModelSpec

    def to_proto(self) -> onnx.ModelProto:
        """Serialize the model, and check it unless it is the user's own."""
        return ir.to_proto(self.model) if self.spec.role == "infer" else finalize(self.model)


class GraphSignature:
    """Inputs and outputs of a graph under construction, in the order of their declaration."""

    def __init__(self, role: str, model: ir.Model, op: OpBuilder) -> None:
        self.role, self.model, self.op = role, model, op
        self._inputs: list[tuple[ir.Value, str]] = []
        self._outputs: list[tuple[ir.Value, str, ir.Value | None]] = []
        self._names: set[str | None] = set()
        self._name_counts = [0, 0, 0]  # inputs, outputs and graph inputs that are in _names

    def declare(self, values: Sequence[ir.Value], role: str) -> None:
        """Declare existing inputs of the graph."""
        self._inputs += [(x, role) for x in values]

    def input(
        self, name: str, role: str, dtype: ir.DataType, dims: Sequence[int | str]
    ) -> ir.Value:
        """Declare a new input; ``.2``, ``.3`` ... is appended to a name that is in use outside."""
        value = ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(dims))
        value.name = self._claim(name)
        self.declare([value], role)
        return value

    def output(
        self, name: str, role: str, value: ir.Value, feeds: ir.Value | None = None
    ) -> ir.Value:
        """Declare an output: a copy of the value with this name."""
        out = self.op.Identity(value)
        shape, kind = value.shape, value.type
        out.name = self._claim(name)
        out.type, out.shape = kind, shape
        self._outputs.append((out, role, feeds))
        return out

    def _claim(self, requested: str) -> str:
        """Return a unique name; an inner value that has it is renamed."""
        op = self.op
        outside, initializers = self._outside_names(), self.model.graph.initializers
        name, n = requested, 2
        while name in outside or name in initializers:
            name, n = f"{requested}.{n}", n + 1
        if name in op.names.taken:
            for node in self.model.graph.all_nodes():
                if node.name == name:
                    node.name = op.names.fresh(f"{name}.inner")
                for y in node.outputs:
                    if y.name == name:
                        y.name = op.names.fresh(f"{name}.inner")
        op.names.taken.add(name)
        return name

    def _outside_names(self) -> set[str | None]:
        """Return the names of inputs and outputs.

        The set is extended since the last call and not rebuilt: there may be thousands of names,
        and one call for each of them.
        """
        graph_inputs = self.model.graph.inputs
        inputs, outputs, known = self._name_counts
        new = [x for x, _ in self._inputs[inputs:]]
        new += [y for y, _, _ in self._outputs[outputs:]]
        new += graph_inputs[known if known <= len(graph_inputs) else 0 :]
        self._names.update(x.name for x in new)
        self._name_counts = [len(self._inputs), len(self._outputs), len(graph_inputs)]
        return self._names

    def replace_output(
        self, old: ir.Value, name: str, role: str, value: ir.Value, feeds: ir.Value
    ) -> None:
        """Replace an output with a value of the graph, under another name and role."""
        index = [y for y, _, _ in self._outputs].index(old)
        value.name = self._claim(name)
        self._outputs[index] = (value, role, feeds)

    def outputs_of(self, role: str) -> list[ir.Value]:
        """Return the outputs of a role, in the order of their declaration."""
        return [y for y, own, _ in self._outputs if own == role]

    def optimize(self, target: str | Target) -> None:
        """Simplify the graph and run the final passes."""
        self._set_inputs_and_outputs()
        graph = self.model.graph
        names = [y.name for y in graph.outputs]
        rewrite_final(self.model, target, last=True)
        assert [y.name for y in graph.outputs] == names, "simplify keeps outputs"
        outputs = zip(graph.outputs, self._outputs, strict=True)
        self._outputs = [(y, role, feeds) for y, (_, role, feeds) in outputs]

    def remove_dead(self) -> None:
        """Remove nodes and inputs that no output needs."""
        self._set_inputs_and_outputs()
        remove_dead(self.model)

    def build(self, target: str | Target) -> BuiltModel:
        """Optimize the graph; return it with its manifest entry."""
        self.optimize(target)
        return self.finish(target)

    def finish(self, target: str | Target) -> BuiltModel:
        """Return the graph with its manifest entry, without optimizing it."""
        self._set_inputs_and_outputs()
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
        return BuiltModel(self.model, spec)

    def _set_inputs_and_outputs(self) -> None:
        graph = self.model.graph
        graph.inputs.clear()
        graph.inputs.extend(x for x, _ in self._inputs)
        graph.outputs.clear()
        graph.outputs.extend(y for y, _, _ in self._outputs)
        graph.name = FILES[self.role].removesuffix(".onnx")


def describe(x: ir.Value, role: str, feeds: str | None = None) -> TensorSpec:
    """Return the manifest entry of an input or output."""
    dims = S.dims_of(x) or ()
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in dims)
    return TensorSpec(x.name or "", dtype_name(x.dtype), shape, role, feeds)


def dtype_name(dtype: ir.DataType | None) -> str:
    """Return the name of a type in the manifest, which is numpy's.

    >>> dtype_name(ir.DataType.FLOAT)
    'float32'
    """
    if dtype is None:
        return "sequence"
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name


def dtype_from_name(name: str) -> ir.DataType:
    """Return the type of a name in the manifest.

    >>> dtype_from_name("float32").name
    'FLOAT'
    """
    return ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper())]


_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class DifferentiatedModel:
    """Forward pass, loss and backward pass of one batch.

    The outputs of the graph are loss, metrics, extra outputs, gradients and new running statistics,
    in this order; its inputs are those of the model, targets, parameters and buffers.
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
    """The ``buffers`` that a training step updates."""
    repairs: tuple[str, ...]
    scale: str | None = None
    """The input for the loss scale, if the loss is scaled."""
    above_one: tuple[str, ...] = ()
    """Products of dimensions that must be above 1 in every batch."""
    compared: Mapping[str, Compared] = dataclasses.field(default_factory=dict)
    """By target: the output that a loss compares with it."""

    def copy(self, role: str, target: str | Target) -> ModelCopy:
        """Return a copy to add nodes to."""
        return ModelCopy(self, role, target)


class ModelCopy:
    """A copy of a :class:`DifferentiatedModel` to add nodes to, with its values by kind."""

    def __init__(self, origin: DifferentiatedModel, role: str, target: str | Target) -> None:
        model = origin.model.clone()
        self.op = OpBuilder(model.graph, "step/", target=target)
        self.signature = GraphSignature(role, model, self.op)
        known = {x.name or "": x for x in model.graph.inputs}
        self.inputs = [known[n] for n in origin.inputs]
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
        """Return the gradients divided by the loss scale."""
        return unscale(self.op, self.gradients, *self.scale) if self.scale else self.gradients

    def report(self, norm_of: Mapping[str, ir.Value] | None) -> None:
        """Declare loss, metrics, the norm of ``norm_of`` and extra outputs."""
        self.signature.output("loss", "loss", self.loss)
        for name, value in self.metrics.items():
            self.signature.output(name, "metric", value)
        if norm_of is not None:
            norm = global_norm(self.op, norm_of)
            self.signature.output(GRAD_NORM, "metric", norm)
        for name, value in self.outputs.items():
            self.signature.output(name, "output", value)

    def declare_new_buffers(self) -> None:
        """Declare the updated running statistics."""
        for name, value in self.new_buffers.items():
            self.signature.output(f"{name}.out", "buffer", value, self.buffers[name])


def differentiate_loss(
    prepared: Prepared, options: BuildOptions, selection: Selection
) -> DifferentiatedModel:
    """Add the loss to the model and differentiate it; the model is changed in place."""
    model, graph = prepared.model, prepared.graph
    repairs: list[str] = []
    if options.mode == "train":
        repairs += to_training(model, trainable=set(selection.candidates))
    above_one = sizes_above_one(model)
    if options.precision.half is not None:
        rewrite_fusions(model, options.target)
        autocast(model, options.precision.half, target=options.target)
    inputs = list(graph.inputs)
    attached, rng, output_names = _attach_losses(model, options, selection)
    repairs += attached.repairs
    # Outputs of the model that nobody requested would keep passes from rewriting their producers.
    requested_outputs = {
        attached.loss.name,
        *(y.name for y in attached.metrics.values()),
        *output_names.values(),
    }
    graph.outputs[:] = [y for y in graph.outputs if y.name in requested_outputs]
    # Passes merge and fold only constants that the loss and earlier passes added: with constants of
    # the file, training graphs would differ from those of existing artifacts.
    unmarked = dataclasses.replace(prepared, constants=frozenset())
    gradient_model = GradientModel(unmarked, options.target, blocks=bool(options.blocks))
    parameters = _reaching_parameters(graph, selection, attached.loss)
    op = gradient_model.op
    statistics = running_statistics(model, op)
    changing = [b.old for b in statistics]
    buffers = [graph.initializers[n] for n in selection.buffers if n in graph.initializers]
    buffers = [*changing, *(x for x in buffers if x not in changing)]
    gradient_model.lift([*parameters, *buffers])
    scale = [op.input(SCALE, _FLOAT, [1])] if options.precision.scaled else []
    dtype = attached.loss.dtype
    seed = op.cast(to_scalar(op, *scale), dtype) if scale else op.const(1.0, dtype)
    gradients = gradient_model.differentiate(
        {attached.loss: seed}, parameters, recompute=options.blocks, batch=[*inputs, *rng]
    )
    extra = _outputs_by_name(graph, output_names)
    results = [attached.loss, *attached.metrics.values(), *extra.values()]
    for x in parameters:
        gradient = gradients[x]
        gradient = op.zeros_like(x) if gradient is None else gradient
        gradient.shape = x.shape
        results.append(gradient)
    gradient_model.set_outputs([*results, *(b.new for b in statistics)])
    gradient_model.rewrite()
    return DifferentiatedModel(
        model=model,
        inputs=_names(inputs),
        targets=_names(attached.targets),
        rng=rng[0].name if rng else None,
        metrics=tuple(attached.metrics),
        outputs=tuple(extra),
        parameters=_names(parameters),
        buffers=_names(buffers),
        changing=_names(changing),
        repairs=tuple(repairs),
        scale=scale[0].name if scale else None,
        above_one=above_one,
        compared=attached.compared,
    )


def training_graph(origin: DifferentiatedModel, options: BuildOptions) -> BuiltModel:
    """Return the graph of loss and accumulated gradients of one batch.

    ``accumulated = reset ? gradient : buffer + gradient`` for each parameter.
    """
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
    """Return the graph of a whole step: loss, new parameters, new state, new buffers."""
    copy = origin.copy("step", options.target)
    signature = copy.signature
    _declare_batch(copy)
    lr = signature.input("learning_rate", "lr", _FLOAT, [1])
    step = signature.input("step", "step", _step_type(options), [1])
    signature.declare(copy.rng, "rng")
    signature.declare(list(copy.parameters.values()), "parameter")
    signature.declare(list(copy.buffers.values()), "buffer")
    signature.declare(copy.scale, "state")
    slots = {x.name or "": x for x in copy.scale}
    slots |= _state_inputs(signature, [s for s in state if s.name not in slots])
    gradients = copy.unscaled()
    copy.report(gradients if GRAD_NORM in options.metrics else None)
    _update(signature, options, copy.parameters, gradients, slots, lr, step)
    copy.declare_new_buffers()
    return signature.build(options.target)


def eval_graph(
    model: ir.Model, options: BuildOptions, selection: Selection, parameters: Sequence[str]
) -> BuiltModel:
    """Return the graph of loss and metrics of one batch, in evaluation mode."""
    graph = model.graph
    inputs = list(graph.inputs)
    attached, rng, output_names = _attach_losses(model, options, selection, evaluation=True)
    extra = _outputs_by_name(graph, output_names)
    op = OpBuilder(graph, "eval/", target=options.target)
    signature = GraphSignature("eval", model, op)
    signature.declare(inputs, "input")
    signature.declare(attached.targets, "target")
    for role, names in (("parameter", parameters), ("buffer", selection.buffers)):
        values = [graph.initializers[n] for n in names if n in graph.initializers]
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
    options: BuildOptions, weights: Sequence[WeightSpec], state: Sequence[StateSpec]
) -> BuiltModel:
    """Return the graph of new parameters and state from accumulated gradients."""
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
    factor = to_scalar(op, scale)
    if options.precision.scaled:
        gradients = unscale(op, gradients, slots[SCALE], factor)
    else:
        gradients = {n: op.Mul(g, op.cast(factor, g.dtype)) for n, g in gradients.items()}
    _update(signature, options, parameters, gradients, slots, lr, step)
    return signature.build(options.target)


_OLDEST_IR = 4  # below, every initializer must also be an input


def inference_model(source: ir.Model) -> BuiltModel:
    """Return the model for inference, in evaluation mode, with its weights as raw bytes.

    Trainers write trained weights into the file at the offsets that the manifest gives.
    """
    model = source.clone()
    strip_traces(model)
    if to_evaluation(model):
        remove_dead(model)
    for x in model.graph.initializers.values():
        if S.is_float(x) and x.const_value is not None and STORED_TENSOR not in x.const_value.meta:
            array = np.ascontiguousarray(x.const_value.numpy()).reshape(x.const_value.shape.numpy())
            x.const_value = ir.Tensor(array, dtype=x.const_value.dtype, name=x.name)
    model.ir_version = max(_OLDEST_IR, min(model.ir_version, NEWEST_IR))
    detach_weights(model)
    spec = ModelSpec(
        role="infer",
        file=FILES["infer"],
        inputs=tuple(describe(x, "input") for x in model.graph.inputs),
        outputs=tuple(describe(y, "output") for y in model.graph.outputs),
    )
    return BuiltModel(model, spec)


def _update(
    signature: GraphSignature,
    options: BuildOptions,
    parameters: dict[str, ir.Value],
    gradients: dict[str, ir.Value],
    slots: dict[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> None:
    """Emit the update, and declare its results as outputs."""
    new, new_state = emit_update(signature.op, options, parameters, gradients, slots, lr, step)
    for name, value in new.items():
        signature.output(f"{name}.out", "parameter", value, parameters[name])
    for name, slot in slots.items():
        signature.output(f"{name}.out", "state", new_state[name], slot)


def emit_update(
    op: OpBuilder,
    options: BuildOptions,
    parameters: dict[str, ir.Value],
    gradients: dict[str, ir.Value],
    slots: dict[str, ir.Value],
    lr: ir.Value,
    step: ir.Value,
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """Emit clipping, optimizer and moving average; return new parameters and new state."""
    precision = options.precision
    scaler = GradScaler(op, precision, slots, gradients) if precision.scaled else None
    if scaler is not None:
        step = scaler.steps_done(step)
    if options.clip.norm is not None:
        gradients = clip_by_global_norm(op, gradients, options.clip.norm)
    if options.clip.value is not None:
        gradients = clip_by_value(op, gradients, options.clip.value)
    if op.target.prefers("few-operators"):
        apply = functools.partial(apply_flattened, options.optimizer)
    else:
        apply = options.optimizer.apply
    new, new_state = apply(op, parameters, gradients, slots, lr, step)
    if options.ema is not None:
        averages = {n: slots[f"{n}.ema"] for n in parameters}
        averaged = moving_average(op, averages, new, options.ema)
        new_state.update({f"{n}.ema": v for n, v in averaged.items()})
    if scaler is not None:
        new, new_state = scaler.keep(parameters, new), scaler.keep(slots, new_state)
        new_state.update(scaler.new_state())
    return new, new_state


def _reaching_parameters(graph: ir.Graph, selection: Selection, loss: ir.Value) -> list[ir.Value]:
    """Return the candidates with a differentiable path to the loss."""
    useful = reaching(graph, [loss], refused=True)
    candidates = [graph.initializers[n] for n in selection.candidates if n in graph.initializers]
    unreachable = [x for x in candidates if x not in useful]
    raise_if_blocked(list(graph), unreachable, [loss])
    if unreachable and selection.explicit:
        raise PrepareError(
            f"no differentiable path to the loss from: {', '.join(_names(unreachable))}\n"
            "hint: remove them from train="
        )
    parameters = [x for x in candidates if x in useful]
    if not parameters:
        raise PrepareError(
            "no parameter reaches the loss\n"
            "hint: onnxtrain.explain(model) shows where gradients stop"
        )
    return parameters


def _attach_losses(
    model: ir.Model, options: BuildOptions, selection: Selection, *, evaluation: bool = False
) -> tuple[Attached, list[ir.Value], dict[str, str]]:
    """Add the loss, and inputs for randomness.

    Return the loss, the random inputs, and the names of the extra outputs in the graph.
    """
    graph = model.graph
    rewrite_inputs(model, options.target)
    attached = attach_loss(
        model,
        options.loss,
        metrics=options.prediction_metrics,
        outputs=selection.outputs,
        target=options.target,
        differentiated=not evaluation,
    )
    # As outputs of the graph, values keep their names when a pass replaces them.
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
    """Return outputs of the graph by the names that the user gave."""
    known = {y.name: y for y in graph.outputs}
    return {n: known[name] for n, name in names.items()}


def _declare_batch(copy: ModelCopy) -> None:
    copy.signature.declare(copy.inputs, "input")
    copy.signature.declare(copy.targets, "target")


def _state_inputs(signature: GraphSignature, state: Sequence[StateSpec]) -> dict[str, ir.Value]:
    return {
        s.name: signature.input(s.name, "state", dtype_from_name(s.dtype), s.shape) for s in state
    }


def _dtype(x: ir.Value) -> ir.DataType:
    assert x.dtype is not None
    return x.dtype


def _step_type(options: BuildOptions) -> ir.DataType:
    return ir.DataType.INT32 if options.target.lacks("int64") else _INT64


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(x.name or "" for x in values)
