"""A loss added to a model, and the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import ElasticLearningPenalty
from onnxtrain.errors import CompatError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import strip_traces

LOSS_PREFIX = "loss/"  # names that the loss adds; its constants are not weights
_SCORES = ("squared_error", "l2", "absolute_error", "l1", "elastic", "log")


def get_train_initializer(onx: onnx.ModelProto) -> dict[str, tuple[np.ndarray, onnx.TensorProto]]:
    """Return the float initializers of a model: array and tensor by name."""
    initializers = {}
    for tensor in onx.graph.initializer:
        kind = ir.DataType(tensor.data_type)
        if kind in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16):
            initializers[tensor.name] = (np.array(ir.from_proto(tensor).numpy()), tensor)
    return initializers


def add_loss_output(
    onx: onnx.ModelProto,
    score_name: str = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, Any] | None = None,
    output_index: int | str | None = None,
    **kwargs: Any,
) -> onnx.ModelProto:
    """Return the model with a loss ``[1, 1]`` as first output, its own prediction as second.

    Args:
        onx: a model; it is not changed.
        score_name: ``squared_error``, ``absolute_error`` or ``elastic`` (``l1_weight``,
            ``l2_weight``), summed; ``log`` (``eps``), the mean over rows for two columns of
            probabilities and labels ``[N, 1]``.
        loss_name: of the new output.
        label_name: of the new input.
        weight_name: of an input for weights of rows, if there is to be one.
        penalty: ``{weight: {"l1": a, "l2": b}}``, or a number for ``l2``.
        output_index: number or name of the prediction; the only output unless given.
        kwargs: settings of the score.
    """
    if score_name not in _SCORES:
        expected = expected_one_of(score_name, _SCORES)
        raise NotImplementedError(f"unknown score: {score_name!r} {expected}")
    work = load_normalized(onx).model
    graph = work.graph
    predicted = _prediction(graph, output_index)
    _rename_value(graph, label_name, predicted)
    op = OpBuilder(graph, LOSS_PREFIX)
    rows = (S.dims_of(predicted) or [None])[0]
    each = _score(op, predicted, score_name, label_name, kwargs)
    assert each.dtype is not None
    if weight_name is not None:
        weight = op.input(weight_name, each.dtype, [rows])
        each = op.Mul(each, op.Unsqueeze(weight, [1]))
    if score_name == "log":
        total = op.Reshape(op.ReduceMean(each, keepdims=0), [1, 1])
    else:
        total = op.ReduceSum(each, keepdims=1)
    for name, settings in (penalty or {}).items():
        if name not in graph.initializers:
            raise CompatError(
                f"unknown weight: {name!r} {expected_one_of(name, graph.initializers)}"
            )
        ratios = settings if isinstance(settings, Mapping) else {"l2": float(settings)}
        w = graph.initializers[name]
        term = ElasticLearningPenalty(ratios.get("l1", 0.0), ratios.get("l2", 0.0)).build(op, [w])
        if term is not None:
            total = op.Add(total, term)
    total.name = loss_name
    total.shape = ir.Shape([1, 1])
    graph.outputs.clear()
    graph.outputs.extend([total, predicted])
    # Not checked: skl2onnx leaves out shapes that it does not know, for which onnx's checker asks.
    strip_traces(work)
    return ir.to_proto(work)


def _prediction(graph: ir.Graph, output_index: int | str | None) -> ir.Value:
    outputs = list(graph.outputs)
    if isinstance(output_index, int):
        return outputs[output_index]
    if output_index is not None:
        for y in outputs:
            if y.name == output_index:
                return y
        raise CompatError(f"unknown output: {output_index!r}")
    if len(outputs) != 1:
        raise CompatError(
            f"the model has {len(outputs)} outputs\nhint: select one with output_index=..."
        )
    return outputs[0]


def _rename_value(graph: ir.Graph, name: str, predicted: ir.Value) -> None:
    """Free a name: classifiers of skl2onnx compute a value called ``label``."""
    for node in graph:
        for y in node.outputs:
            if y.name == name and y is not predicted:
                y.name = f"_{name}_"


def _score(
    op: OpBuilder, predicted: ir.Value, score_name: str, label_name: str, kwargs: Mapping[str, Any]
) -> ir.Value:
    if score_name == "log":
        return _log_likelihood(op, predicted, label_name, float(kwargs.get("eps", 1e-6)))
    dtype = predicted.dtype
    assert dtype is not None
    label = op.input(label_name, dtype, list(op.dims(predicted)))
    d = op.Sub(predicted, label)
    if score_name in ("squared_error", "l2"):
        return op.Mul(d, d)
    if score_name in ("absolute_error", "l1"):
        return op.Abs(d)
    l1, l2 = float(kwargs.get("l1_weight", 0.5)), float(kwargs.get("l2_weight", 0.5))
    return op.Add(op.Mul(op.Abs(d), l1), op.Mul(op.Mul(d, d), l2))


def _log_likelihood(op: OpBuilder, predicted: ir.Value, label_name: str, eps: float) -> ir.Value:
    """Emit ``-log`` of the probability of each label, from clipped and normalized ones."""
    dtype = predicted.dtype
    assert dtype is not None
    rows = (S.dims_of(predicted) or [None])[0]
    label = op.input(label_name, ir.DataType.INT64, [rows, 1])
    clipped = op.Clip(predicted, op.const(eps, dtype), op.const(1.0 - eps, dtype))
    logarithm = op.Log(op.Div(clipped, op.ReduceSum(clipped, [1], keepdims=1)))
    yes = op.cast(label, dtype)
    expected = op.Concat(op.Sub(op.const(1.0, dtype), yes), yes, axis=1)
    return op.Neg(op.ReduceSum(op.Mul(logarithm, expected), [1], keepdims=1))


def _rewrite_op_no_grad(onx: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with ``1 / x`` for each Reciprocal, as onnxcustom does for its engine."""
    work = ir.from_proto(onx)
    for node in list(work.graph):
        if node.op_type == "Reciprocal" and node.domain == "":
            (x,), (y,) = node.inputs, node.outputs
            op = OpBuilder(work.graph, LOSS_PREFIX)
            one = op.const(1.0, y.dtype or ir.DataType.FLOAT)
            divide = ir.node("Div", [one, x], outputs=[ir.Value(type=y.type, shape=y.shape)])
            ir.convenience.replace_nodes_and_values(
                work.graph, node, [node], [divide], [y], divide.outputs
            )
    return ir.to_proto(work)
