"""From a forward model with a loss to the training model and the evaluation model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.artifacts.signature import GraphSignature, describe
from onnxtrain.autodiff.gradient_model import GradientModel
from onnxtrain.autodiff.load_normalized import kept_for, lacks_rule
from onnxtrain.autodiff.selection import reaching
from onnxtrain.compat.ort.build.evaluation import evaluation_model, rename
from onnxtrain.compat.ort.errors import OrtError, as_ort_errors
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.graph.modes import running_statistics
from onnxtrain.graph.modes.randomness import portable_dropout
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.prepare import prepare
from onnxtrain.lowering.restate import restate
from onnxtrain.manifest import ModelSpec

_BOOL = ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be trained, and what comes out."""

    trainable: Collection[str]
    frozen: Collection[str]
    given: Collection[str]
    """Inputs that the model came with; the others are targets."""
    unreduced: bool = False
    """The loss is one number per element; the gradient is that of their sum."""
    loss_name: str | None = None
    """What to call the loss, if it is no output of the model itself."""
    custom_operators: bool = False


@dataclasses.dataclass(frozen=True)
class Built:
    """Both models, what describes them, and the tensors that became inputs."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    specs: tuple[ModelSpec, ModelSpec]
    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    buffers: list[onnx.TensorProto]


def build_training(forward: onnx.ModelProto, request: Request) -> Built:
    """Return training and evaluation model of ``forward``, whose first output is the loss."""
    _check_names(forward, request)
    if request.loss_name is not None:
        _rename_loss(forward, request)
    with as_ort_errors():
        training, spec, buffers = _training_model(forward, request)
    tensors = {t.name: t for t in forward.graph.initializer}
    named = {*request.trainable, *request.frozen}
    weights = [n for n in tensors if n in named]
    hidden = [n for n in buffers if n not in named]
    inputs = [x.name for x in forward.graph.input if x.name not in tensors]
    evaluation = evaluation_model(forward, inputs, [*weights, *hidden])
    roles = {t.name: t.role for t in spec.inputs}
    return Built(
        training,
        evaluation,
        (spec, _eval_spec(evaluation, roles)),
        [tensors[n] for n in weights if n in request.trainable],
        [tensors[n] for n in weights if n in request.frozen],
        [tensors[n] for n in hidden],
    )


def _check_names(forward: onnx.ModelProto, request: Request) -> None:
    known = {x.name for x in (*forward.graph.initializer, *forward.graph.input)}
    missing = [n for n in (*request.trainable, *request.frozen) if n not in known]
    if missing:
        raise OrtError(
            f"Node arg {', '.join(missing)} is not found in the graph\n"
            "hint: requires_grad and frozen_params take names of initializers and inputs"
        )


def _rename_loss(forward: onnx.ModelProto, request: Request) -> None:
    old, new = forward.graph.output[0].name, request.loss_name
    assert new is not None
    graph = forward.graph
    taken = {x.name for x in (*graph.input, *graph.initializer)}
    taken |= {y for node in graph.node for y in node.output}
    if old.startswith("onnx::") and new not in taken:
        rename(forward, old, new)


def _training_model(
    forward: onnx.ModelProto, request: Request
) -> tuple[onnx.ModelProto, ModelSpec, list[str]]:
    """Return the model, its description, and the names of running statistics."""
    domains = {o.domain for o in forward.opset_import} if request.custom_operators else set()
    model = prepare(load(forward, allow_domains=domains), inline=lacks_rule, keep=kept_for("cpu"))
    graph = model.graph
    inputs = list(graph.inputs)
    portable_dropout(model)
    rng = [x for x in graph.inputs if x not in inputs]
    loss = graph.outputs[0]
    _check_loss(loss, request)
    outputs = list(zip((y.name for y in forward.graph.output), graph.outputs, strict=True))
    made = GradientModel(model)
    op = made.op
    statistics = running_statistics(model, op)
    values = {**dict(graph.initializers), **{x.name or "": x for x in inputs}}
    named = [
        t for t in forward.graph.initializer if t.name in {*request.trainable, *request.frozen}
    ]
    chosen = [values[t.name] for t in named if t.name in request.trainable and t.name in values]
    chosen += [x for x in inputs if x.name in request.trainable]
    _check_reach(graph, loss, chosen, request)
    hidden = [b.old for b in statistics if b.name not in {t.name for t in named}]
    made.lift([*(values[t.name] for t in named if t.name in values), *hidden])
    seed = op.const(1.0, loss.dtype) if S.dims_of(loss) == () else op.ones_like(loss)
    sweep = made.differentiate({loss: seed}, chosen) if chosen else {}
    results = [op.zeros_like(x) if (g := sweep[x]) is None else g for x in chosen]
    made.set_outputs([*(y for _, y in outputs), *results, *(b.new for b in statistics)])
    made.rewrite()
    ends = iter(list(graph.outputs))
    outputs = [(name, next(ends)) for name, _ in outputs]
    gradients = {x: next(ends) for x in chosen}
    changed = {b: next(ends) for b in statistics}
    graph.outputs.clear()

    signature = GraphSignature("train", model, OpBuilder(graph, "step/"))
    for x in inputs:
        signature.declare([x], "input" if x.name in request.given else "target")
    changing = {b.name for b in statistics}
    for tensor in named:
        role = "parameter" if tensor.name in request.trainable else "frozen"
        if tensor.name in values:
            signature.declare([values[tensor.name]], "buffer" if tensor.name in changing else role)
        else:  # nothing reads it, but it is a parameter all the same
            signature.input(tensor.name, role, ir.DataType(tensor.data_type), list(tensor.dims))
    signature.declare(hidden, "buffer")
    _accumulate(signature, outputs, gradients, rng)
    for b, new in changed.items():
        signature.output(f"{b.name}.out", "buffer", new, b.old)
    proto, spec = signature.build("cpu")
    return _at_opset_of(forward, proto), spec, [b.name for b in statistics]


def _accumulate(
    signature: GraphSignature,
    outputs: Sequence[tuple[str, ir.Value]],
    gradients: dict[ir.Value, ir.Value],
    rng: Sequence[ir.Value],
) -> None:
    """Declare buffers, switch, outputs, and the sums of gradients that replace the buffers."""
    op = signature.op
    old = {
        x: signature.input(f"{x.name}_grad.accumulation.buffer", "accumulator", x.dtype, op.dims(x))  # pyright: ignore[reportArgumentType]
        for x in gradients
    }
    reset = signature.input("lazy_reset_grad", "reset", _BOOL, [1])
    signature.declare(rng, "rng")
    for i, (name, value) in enumerate(outputs):
        signature.output(name, "output" if i else "loss", value)
    flag = op.Reshape(reset, op.const([]))
    for x, gradient in gradients.items():
        gradient.shape = x.shape
        total = op.Where(flag, gradient, op.Add(old[x], gradient))
        total.shape = x.shape
        signature.output(f"{x.name}_grad.accumulation.out", "gradient", total, old[x])


def _check_loss(loss: ir.Value, request: Request) -> None:
    if not S.is_float(loss):
        raise OrtError(f"The loss is not a float: {S.describe_value(loss)}")
    if S.dims_of(loss) not in ((), (1,)) and not request.unreduced:
        raise OrtError(
            f"The loss must be a scalar: {S.describe_value(loss)}\n"
            "hint: give a loss, or end your own with blocks.ReduceMean(keepdims=False)"
        )


def _check_reach(
    graph: ir.Graph, loss: ir.Value, chosen: Sequence[ir.Value], request: Request
) -> None:
    useful = reaching(graph, [loss])
    alive = {x.name for x in chosen if x in useful}
    dead = [n for n in request.trainable if n not in alive]
    if dead:
        raise OrtError(
            f"Cannot compute the partial derivative for {', '.join(sorted(dead))}: "
            f"no differentiable path leads to {loss.name}\nhint: leave it out of requires_grad"
        )


def _at_opset_of(forward: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model at the opset of the user's, or as it is where that lacks operators."""
    opset = max(o.version for o in forward.opset_import if is_standard(o))
    model = ir.from_proto(proto)
    return proto if restate(model, opset) else ir.to_proto(model)


def _eval_spec(model: onnx.ModelProto, roles: dict[str, str]) -> ModelSpec:
    graph = ir.from_proto(model).graph
    return ModelSpec(
        role="eval",
        file="eval_model.onnx",
        inputs=tuple(describe(x, roles.get(x.name or "", "input")) for x in graph.inputs),
        outputs=tuple(describe(y, "output" if i else "loss") for i, y in enumerate(graph.outputs)),
    )
