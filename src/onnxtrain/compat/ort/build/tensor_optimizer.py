"""Optimizer models over single tensors, which any runtime can feed, the web's among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.graphs import optimizer_graph
from onnxtrain.artifacts.options import UpdateOptions
from onnxtrain.artifacts.signature import GraphSignature
from onnxtrain.compat.ort.build.embed import embed
from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.io import load
from onnxtrain.graph.prepare.versions import IR_VERSION
from onnxtrain.lowering.restate import restate
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, TensorSpec, WeightSpec
from onnxtrain.optim import Optimizer
from onnxtrain.optim.clip import Clip

TensorOptimizer = tuple[onnx.ModelProto, ModelSpec, list[StateSpec]]
Weights = Sequence[TensorSpec] | Sequence[WeightSpec]

_PARAMS, _GRADIENTS = "params", "gradients"
_SLOTS = {"first_order_moments": "exp_avg", "second_order_moments": "exp_avg_sq"}
_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def optimizer_model(
    optimizer: Optimizer, max_norm: float | None, weights: Sequence[WeightSpec], opset: int
) -> TensorOptimizer:
    """Return the model of one of the library's optimizers, its description and its state."""
    state = [
        StateSpec(f"{w.name}.{s.name}", w.name, s.name, w.dtype, w.shape, s.init)
        for w in weights
        for s in optimizer.slots(w.name, w.shape, _dtype(w))
    ]
    options = UpdateOptions(optimizer=optimizer, clip=Clip(norm=max_norm))
    proto, spec = optimizer_graph(options, weights, state)
    model = ir.from_proto(proto)
    return (proto if restate(model, opset) else ir.to_proto(model)), spec, state


def takes_sequences(model: onnx.ModelProto) -> bool:
    """Return whether an optimizer model has the old signature."""
    return any(x.name == _PARAMS and x.type.HasField("sequence_type") for x in model.graph.input)


def flatten(model: onnx.ModelProto, parameters: Weights) -> onnx.ModelProto:
    """Return an optimizer over sequences as one over single tensors, its description embedded."""
    proto, spec, state = tensor_optimizer_of(model, parameters)
    embed(proto, Manifest((spec,), (), (), tuple(state), {}, {}))
    return proto


def tensor_optimizer_of(model: onnx.ModelProto, parameters: Weights) -> TensorOptimizer:
    """Wrap an optimizer over sequences: they are made of single inputs, and taken apart again."""
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
    proto, spec = signature.build("cpu")
    return proto, spec, state


def _shape(p: TensorSpec | WeightSpec) -> tuple[int, ...]:
    return tuple(int(d) for d in p.shape)


def _dtype(t: TensorSpec | WeightSpec | StateSpec) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(t.dtype))
