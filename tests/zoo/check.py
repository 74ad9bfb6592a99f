"""Our parameter gradients of a zoo model against torch's, in float32 and float64."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator

import onnxtrain
from onnxtrain.errors import UndifferentiableError
from tests.node_cases.precision import double_array, to_double

from .export import export
from .models import ZooModel

TOLERANCE = 1e-4
DOUBLE_TOLERANCE = 1e-6
# A gradient this much smaller than the model's largest is measured against the largest.
FLOOR = 1e-3
# Some gradients are zero by nature (a bias before BatchNorm); torch's own rounding bounds those.
TORCH_FACTOR = 3.0

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Expected:
    """Torch's outputs and parameter gradients in one precision."""

    outputs: list[np.ndarray]
    gradients: Arrays


@dataclass
class Result:
    """What one model in one mode came to."""

    name: str
    mode: str
    exporter: str = ""
    parameters: int = 0
    nodes_forward: int = 0
    nodes_backward: int = 0
    worst: float = 0.0
    worst_name: str = ""
    status: str = "pass"
    notes: list[str] = field(default_factory=list)

    def fail(self, note: str) -> None:
        self.status = "fail"
        self.notes.append(note)


def check(entry: ZooModel, mode: str = "eval") -> Result:
    """Compare forward values and every parameter gradient at two batch sizes."""
    result = Result(entry.name, mode)
    exported = export(entry, mode)
    result.exporter = exported.recipe.exporter
    module = entry.build(mode)
    result.parameters = sum(p.numel() for p in module.parameters())
    names = exported.names
    wrt = list(names.values())
    try:
        gradient = onnxtrain.vjp(exported.model, wrt)
    except UndifferentiableError as error:
        result.status = "refused"
        result.notes.append(str(error))
        return result
    parameters = onnxtrain.parameters(exported.model, wrt)
    for name, parameter in module.named_parameters():
        if not np.array_equal(parameters[names[name]], parameter.detach().numpy()):
            result.fail(f"parameter {name!r} has other values in the exported model")
    _count_nodes(result, exported.model, gradient)
    _check_standard(result, gradient)
    session = _session(gradient)
    for batch in entry.batches[:1] if entry.static else entry.batches:
        _check_batch(result, entry, mode, batch, gradient, session, parameters, names)
    return result


def _check_batch(result, entry, mode, batch, gradient, session, parameters, names) -> None:
    expected32 = _torch(entry, mode, batch, torch.float32)
    expected64 = _torch(entry, mode, batch, torch.float64)
    feeds = _feeds(gradient, entry, batch, parameters, expected32.outputs)
    outputs = session.run(None, feeds)
    count = len(expected64.outputs)
    for index, (y, y32, y64) in enumerate(
        zip(outputs[:count], expected32.outputs, expected64.outputs, strict=True)
    ):
        if y.shape != y64.shape:
            result.fail(f"output {index} at batch {batch}: shape {y.shape}, torch {y64.shape}")
        elif not _close(y, y32, y64, TOLERANCE * _norm(y64)):
            result.fail(f"output {index} at batch {batch} is off by {_norm(y - y64):.1e}")
    gradients = dict(zip(names, outputs[count:], strict=True))
    misses = _misses(result, batch, gradients, expected32.gradients, expected64.gradients)
    if misses:
        _settle_in_double(result, entry, batch, gradient, feeds, names, expected64, misses)


def _misses(result: Result, batch: int, gradients: Arrays, e32: Arrays, e64: Arrays) -> list[str]:
    """Descriptions of the gradients outside the bound; ``result.worst`` is kept up to date."""
    floor = FLOOR * max(_norm(g) for g in e64.values())
    misses = []
    for name, g in gradients.items():
        if g.shape != e64[name].shape:
            result.fail(f"{name}_grad has shape {g.shape}, torch {e64[name].shape}")
            continue
        scale = max(_norm(e64[name]), floor)
        error = _norm(g - e64[name]) / scale
        if not error <= result.worst:
            result.worst, result.worst_name = error, name
        if not _close(g, e32[name], e64[name], TOLERANCE * scale):
            misses.append(f"{name}_grad at batch {batch} is off by {error:.1e}")
    return misses


def _settle_in_double(result, entry, batch, gradient, feeds, names, e64, misses) -> None:
    """Accept misses where a kink is known and the same graph in float64 meets torch."""
    wide = {name: double_array(value) for name, value in feeds.items()}
    try:
        gradients = evaluate_double(gradient, wide)[len(e64.outputs) :]
    except Exception as error:  # the evaluator raises whatever its kernels raise
        result.notes.append(f"float64 evaluation failed: {type(error).__name__}: {error}"[:300])
        gradients = None
    if gradients is not None:
        floor = FLOOR * max(_norm(g) for g in e64.gradients.values())
        worst = max(
            _norm(g - e64.gradients[name]) / max(_norm(e64.gradients[name]), floor)
            for name, g in zip(names, gradients, strict=True)
        )
        result.notes.append(f"batch {batch} in float64: worst {worst:.1e}; {entry.kink}")
        if entry.kink and worst <= DOUBLE_TOLERANCE:
            return
    for miss in misses:
        result.fail(miss)


def evaluate_double(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    """Outputs of the model cast to float64 on onnx's reference evaluator."""
    wide = to_double(model)
    for node in _nodes(wide.graph):
        if node.op_type == "LayerNormalization":
            # The evaluator refuses another stash type, and computes in the input's type anyway.
            kept = [a for a in node.attribute if a.name != "stash_type"]
            node.ClearField("attribute")
            node.attribute.extend(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ReferenceEvaluator(wide).run(None, feeds)


def _torch(entry: ZooModel, mode: str, batch: int, dtype: torch.dtype) -> Expected:
    """Torch's outputs and gradients of the outputs contracted with the cotangents."""
    module = entry.build(mode).to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in entry.inputs(batch)]
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [
        torch.from_numpy(cotangent(entry, batch, index, tuple(y.shape))).to(dtype)
        for index, y in enumerate(outputs)
    ]
    torch.autograd.backward(outputs, seeds)
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
        for name, p in module.named_parameters()
    }
    return Expected([y.detach().numpy() for y in outputs], gradients)


def cotangent(entry: ZooModel, batch: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Fixed weights with which output ``index`` is contracted to a scalar."""
    generator = np.random.default_rng([entry.seed, batch, index])
    return np.asarray(generator.standard_normal(shape), dtype=np.float32)


def _feeds(
    gradient: onnx.ModelProto,
    entry: ZooModel,
    batch: int,
    parameters: Arrays,
    outputs: list[np.ndarray],
) -> Arrays:
    """Inputs by the order that ``vjp`` promises: the model's, the parameters, the cotangents."""
    values = itertools.chain(
        (x.numpy() for x in entry.inputs(batch)),
        parameters.values(),
        (cotangent(entry, batch, index, y.shape) for index, y in enumerate(outputs)),
    )
    return {slot.name: value for slot, value in zip(gradient.graph.input, values, strict=True)}


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _check_standard(result: Result, model: onnx.ModelProto) -> None:
    """Standard operators only, valid for onnx's full checker."""
    foreign = sorted({f"{n.domain}::{n.op_type}" for n in _nodes(model.graph) if n.domain})
    if foreign or model.functions:
        result.fail(f"not standard operators: {foreign or 'local functions'}")
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        result.fail(f"onnx.checker: {error}"[:300])


def _count_nodes(result: Result, model: onnx.ModelProto, gradient: onnx.ModelProto) -> None:
    """Nodes of the gradient model that compute values and gradients, bodies of loops included."""
    gradients = {value.name for value in gradient.graph.output[len(model.graph.output) :]}
    for node in gradient.graph.node:
        body = sum(1 for a in node.attribute for _ in _nodes(a.g))
        if any(name in gradients or name.startswith("grad/") for name in node.output):
            result.nodes_backward += 1 + body
        else:
            result.nodes_forward += 1 + body


def _nodes(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _close(y: np.ndarray, y32: np.ndarray, y64: np.ndarray, bound: float) -> bool:
    return _norm(y - y64) <= max(bound, TORCH_FACTOR * _norm(y32 - y64))


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, dtype=np.float64).ravel()))
