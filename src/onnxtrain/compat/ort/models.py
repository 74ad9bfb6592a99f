"""Build the training, evaluation, optimizer and inference models of ``onnxruntime.training``.

In this order: the evaluation model (the forward model in evaluation mode, with parameters as
inputs), files in ORT format, the training model, the manifest in a model's metadata (the old API
passes model files only), the inference model, and optimizer models over single tensors instead of
sequences.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.artifacts.graphs import GraphSignature, describe, optimizer_graph
from onnxtrain.autodiff.gradients import GradientModel, keep_predicate, lacks_rule
from onnxtrain.autodiff.selection import reaching
from onnxtrain.compat.ort.errors import OrtError, as_ort_errors
from onnxtrain.compat.ort.state import Store
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_nodes
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.writer import strip_traces
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.importer import prepare
from onnxtrain.importer.opset import IR_VERSION
from onnxtrain.lowering.lower import downgrade_opset
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, TensorSpec, WeightSpec
from onnxtrain.modes import running_statistics
from onnxtrain.modes.randomness import portable_dropout
from onnxtrain.optim import Optimizer
from onnxtrain.optim.optimizer import Clip
from onnxtrain.runtime.devices import import_onnxruntime


def evaluation_model(
    forward: onnx.ModelProto, inputs: Sequence[str], weights: Sequence[str]
) -> onnx.ModelProto:
    """Return the forward model with Dropout off and BatchNormalization on its statistics.

    Args:
        forward: the model with its loss; it is not changed.
        inputs: names of its inputs, in the order wanted.
        weights: initializers that become inputs, after those.
    """
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    graph = model.graph
    graph.name = "eval_model"
    renamed: dict[str, str] = {}
    for node in nodes_of(graph):
        if is_standard(node):
            _switch_off(node, renamed)
    for node in nodes_of(graph):
        node.input[:] = [renamed.get(x, x) for x in node.input]
    for old, new in renamed.items():
        if any(y.name == old for y in graph.output):
            graph.node.add(op_type="Identity", input=[new], output=[old], name=old)
    known = {x.name: x for x in graph.input}
    wanted = [known[n] for n in inputs]
    tensors = {t.name: t for t in graph.initializer}
    for name in weights:
        value = onnx.ValueInfoProto(name=name)
        kind = value.type.tensor_type
        kind.elem_type = tensors[name].data_type
        kind.shape.SetInParent()
        for size in tensors[name].dims:
            kind.shape.dim.add(dim_value=size)
        wanted.append(value)
    kept = [t for n, t in tensors.items() if n not in set(weights)]
    del graph.input[:], graph.initializer[:]
    graph.input.extend(wanted)
    graph.initializer.extend(kept)
    result = ir.from_proto(model)
    strip_traces(result)  # no paths of the exporting machine in the file
    return ir.to_proto(result)


def _switch_off(node: onnx.NodeProto, renamed: dict[str, str]) -> None:
    if node.op_type == "Dropout" and len(node.input) > 2:
        node.input[2] = ""
    elif node.op_type == "BatchNormalization":
        for attribute in node.attribute:
            if attribute.name == "training_mode":
                attribute.i = 0
        # Whoever reads a new statistic gets the one it would have started from.
        renamed.update(zip(node.output[1:3], node.input[3:5], strict=False))
        del node.output[1:]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Return the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
            for inner in attribute.graphs:
                yield from nodes_of(inner)


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    """Give a value of the graph another name."""
    for node in nodes_of(model.graph):
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for values in (model.graph.output, model.graph.value_info):
        for value in values:
            if value.name == old:
                value.name = new


def write_ort_format(path: Path, custom_op_library: str | None) -> None:
    """Write ``<name>.ort`` and ``<name>.required_operators.config`` next to a model."""
    import_onnxruntime()
    tool = importlib.import_module("onnxruntime.tools.convert_onnx_models_to_ort")
    tool.convert_onnx_models_to_ort(
        path,
        output_dir=path.parent,
        custom_op_library_path=None if custom_op_library is None else Path(custom_op_library),
        optimization_styles=[tool.OptimizationStyle.Fixed],
    )


_BOOL = ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class Request:
    """What to train, and the outputs of the models."""

    trainable: Collection[str]
    frozen: Collection[str]
    given: Collection[str]
    """The original inputs of the model; the others are targets."""
    unreduced: bool = False
    """Whether the loss has one value per element; the gradient is that of the sum."""
    loss_name: str | None = None
    """Name of the loss, if it is not an output of the model."""
    custom_operators: bool = False


@dataclasses.dataclass(frozen=True)
class Built:
    """Both models, their manifest entries, and the tensors that became inputs."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    specs: tuple[ModelSpec, ModelSpec]
    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    buffers: list[onnx.TensorProto]


def build_training(forward: onnx.ModelProto, request: Request) -> Built:
    """Return the training and evaluation model of ``forward``, whose first output is the loss."""
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
    """Return the model, its manifest entry, and the names of running statistics."""
    domains = {o.domain for o in forward.opset_import} if request.custom_operators else set()
    prepared = prepare(
        load(forward, allow_domains=domains), inline=lacks_rule, keep=keep_predicate("cpu")
    )
    model, graph = prepared.model, prepared.graph
    inputs = list(graph.inputs)
    portable_dropout(model)
    rng = [x for x in graph.inputs if x not in inputs]
    loss = graph.outputs[0]
    _check_loss(loss, request)
    outputs = list(zip((y.name for y in forward.graph.output), graph.outputs, strict=True))
    made = GradientModel(prepared)
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
    built = signature.build(prepared.restrict("cpu"))
    return _at_opset_of(forward, built.to_proto()), built.spec, [b.name for b in statistics]


def _accumulate(
    signature: GraphSignature,
    outputs: Sequence[tuple[str, ir.Value]],
    gradients: dict[ir.Value, ir.Value],
    rng: Sequence[ir.Value],
) -> None:
    """Add accumulation buffers, the reset flag, outputs, and the accumulated gradients."""
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
    """Return the model in the user's opset, or unchanged if that opset lacks operators."""
    opset = max(o.version for o in forward.opset_import if is_standard(o))
    model = ir.from_proto(proto)
    return proto if downgrade_opset(model, opset) else ir.to_proto(model)


def _eval_spec(model: onnx.ModelProto, roles: dict[str, str]) -> ModelSpec:
    graph = ir.from_proto(model).graph
    return ModelSpec(
        role="eval",
        file="eval_model.onnx",
        inputs=tuple(describe(x, roles.get(x.name or "", "input")) for x in graph.inputs),
        outputs=tuple(describe(y, "output" if i else "loss") for i, y in enumerate(graph.outputs)),
    )


KEY = "onnxtrain"
INITIAL_LR = 1e-3


def manifest_of(
    built: Built,
    models: Sequence[ModelSpec] = (),
    state: Sequence[StateSpec] = (),
    optimizer: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of the models of a training run."""
    return Manifest(
        models=(*built.specs, *models),
        parameters=tuple(weight(t) for t in built.trainable),
        # What training does not change is kept beside the running statistics.
        buffers=tuple(weight(t) for t in (*built.frozen, *built.buffers)),
        state=tuple(state),
        optimizer=dict(optimizer or {"name": "none", "lr": INITIAL_LR}),
        loss={"output": built.specs[0].outputs[0].name, "name": "onnxblock"},
        options={"compat": "onnxruntime.training", "mode": "as-is"},
    )


def weight(tensor: onnx.TensorProto) -> WeightSpec:
    """Return the manifest's entry of a parameter or buffer."""
    dtype = ir.DataType(tensor.data_type).numpy().name
    return WeightSpec(tensor.name, dtype, tuple(tensor.dims))


def embed(model: onnx.ModelProto, manifest: Manifest) -> None:
    """Write the manifest into a model's metadata."""
    kept = [p for p in model.metadata_props if p.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=KEY, value=manifest.to_json(hashes=False))


def export_for_inference(
    source: str | bytes, store: Store, names: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write a model with the outputs ``names`` and the weights in ``store``."""
    if not names:
        raise OrtError("Expected a non empty vector of graph output names. Got an empty vector.")
    if isinstance(source, str) and source.endswith(".ort"):
        raise OrtError("Only an evaluation model in ONNX format can be exported, not an .ort file")
    with as_ort_errors():
        model = load(source, allow_domains=domains_of(source))
    graph = model.graph
    values = {y.name: y for node in graph for y in node.outputs}
    unknown = [n for n in names if n not in values]
    if unknown:
        raise OrtError(
            f"Expected graph output for inference graph {unknown[0]} could not be found. "
            "Please regenerate the eval graph."
        )
    graph.outputs.clear()
    graph.outputs.extend(values[n] for n in names)
    for x in [x for x in graph.inputs if x.name in store.values]:
        graph.inputs.remove(x)
        x.const_value = ir.Tensor(store.array(x.name or ""), name=x.name)
        graph.register_initializer(x)
    remove_dead(model)
    for x in list(graph.inputs):
        if not x.uses() and not x.is_graph_output():
            graph.inputs.remove(x)
    model.metadata_props.pop(KEY, None)
    graph.name = "inference_model"
    with as_ort_errors():
        save(model, path)


def domains_of(source: str | os.PathLike[str] | bytes) -> set[str]:
    """Return every operator domain that a model imports, for one whose author is trusted."""
    if isinstance(source, bytes):
        model = onnx.load_from_string(source)
    else:
        model = onnx.load(source, load_external_data=False)
    return {o.domain for o in model.opset_import}


TensorOptimizer = tuple[onnx.ModelProto, ModelSpec, list[StateSpec]]
Weights = Sequence[TensorSpec] | Sequence[WeightSpec]

_PARAMS, _GRADIENTS = "params", "gradients"
_SLOTS = {"first_order_moments": "exp_avg", "second_order_moments": "exp_avg_sq"}
_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def optimizer_model(
    optimizer: Optimizer, max_norm: float | None, weights: Sequence[WeightSpec], opset: int
) -> TensorOptimizer:
    """Return the model of an onnxtrain optimizer, its manifest entry and its state."""
    state = [
        StateSpec(f"{w.name}.{s.name}", w.name, s.name, w.dtype, w.shape, s.init)
        for w in weights
        for s in optimizer.slots(w.name, w.shape, _dtype(w))
    ]
    # Only the update is built, so the loss is not used.
    options = BuildOptions(loss="", optimizer=optimizer, clip=Clip(norm=max_norm))
    built = optimizer_graph(options, weights, state)
    proto = built.to_proto()
    model = ir.from_proto(proto)
    return (proto if downgrade_opset(model, opset) else ir.to_proto(model)), built.spec, state


def uses_sequences(model: onnx.ModelProto) -> bool:
    """Return whether an optimizer model works on sequences, as in onnxruntime-training."""
    return any(x.name == _PARAMS and x.type.HasField("sequence_type") for x in model.graph.input)


def flatten(model: onnx.ModelProto, parameters: Weights) -> onnx.ModelProto:
    """Convert an optimizer over sequences to one over single tensors, and embed its manifest."""
    proto, spec, state = tensor_optimizer_of(model, parameters)
    embed(proto, Manifest((spec,), (), (), tuple(state), {}, {}))
    return proto


def tensor_optimizer_of(model: onnx.ModelProto, parameters: Weights) -> TensorOptimizer:
    """Wrap an optimizer over sequences: build them from single inputs, and split the results."""
    inner = load(model).graph
    given = {x.name or "": x for x in inner.inputs}
    results = [y.name or "" for y in inner.outputs]
    if _PARAMS not in given or f"{_PARAMS}.out" not in results:
        raise OrtError(
            "The optimizer block gives no new parameters\n"
            "hint: build it on onnxblock.optim.AdamW, SGD, or optim.optim.AdamWOptimizer"
        )
    used = {"", *(node.domain for node in inner.all_nodes())}
    imports = {domain: v for domain, v in inner.opset_imports.items() if domain in used}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="optimizer")
    op = OpBuilder(graph, "flat/")
    signature = GraphSignature("optimizer", ir.Model(graph, ir_version=IR_VERSION), op)
    state = [
        StateSpec(f"{p.name}.{_SLOTS[m]}", p.name, _SLOTS[m], p.dtype, _shape(p), 0.0)
        for m in given
        if f"{m}.out" in results and m in _SLOTS
        for p in parameters
    ]
    scalars = {
        "learning_rate": signature.input("learning_rate", "lr", _FLOAT, [1]),
        "step": signature.input("step", "step", _INT64, [1]),
    }
    scale = op.Reshape(signature.input("grad_scale", "grad_scale", _FLOAT, [1]), op.const([]))
    values = [signature.input(p.name, "parameter", _dtype(p), _shape(p)) for p in parameters]
    grads = [
        signature.input(f"{p.name}_grad", "gradient", _dtype(p), _shape(p)) for p in parameters
    ]
    slots = {s.name: signature.input(s.name, "state", _dtype(s), s.shape) for s in state}
    sequences = {
        _PARAMS: op.SequenceConstruct(*values),
        _GRADIENTS: op.SequenceConstruct(*(op.Mul(g, op.cast(scale, g.dtype)) for g in grads)),
    }
    for name, slot in _SLOTS.items():
        mine = [slots[s.name] for s in state if s.slot == slot]
        # SGD has moments in its signature that nothing reads; anything will do for them.
        sequences[name] = op.SequenceConstruct(*mine) if mine else sequences[_PARAMS]
    mapping = {x: {**scalars, **sequences}[n] for n, x in given.items()}
    for x in inner.initializers.values():
        assert x.const_value is not None
        mapping[x] = op.const(x.const_value.numpy(), x.dtype)
    outputs = dict(zip(results, copy_nodes(op, inner, mapping), strict=True))
    for i, (p, old) in enumerate(zip(parameters, values, strict=True)):
        new = op.SequenceAt(outputs[f"{_PARAMS}.out"], i)
        new.type, new.shape = old.type, old.shape
        signature.output(f"{p.name}.out", "parameter", new, old)
    for i, s in enumerate(state):
        sequence = next(m for m, slot in _SLOTS.items() if slot == s.slot)
        new, old = op.SequenceAt(outputs[f"{sequence}.out"], i % len(values)), slots[s.name]
        new.type, new.shape = old.type, old.shape
        signature.output(f"{s.name}.out", "state", new, old)
    built = signature.build("cpu")
    return built.to_proto(), built.spec, state


def _shape(p: TensorSpec | WeightSpec) -> tuple[int, ...]:
    return tuple(int(d) for d in p.shape)


def _dtype(t: TensorSpec | WeightSpec | StateSpec) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(t.dtype))
