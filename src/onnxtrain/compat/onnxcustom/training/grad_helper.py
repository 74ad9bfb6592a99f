"""Gradient graphs of models."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import vjp
from onnxtrain.compat.onnxcustom.utils.onnx_helper import float_initializers
from onnxtrain.compat.onnxcustom.utils.orttraining_helper import LOSS_PREFIX
from onnxtrain.compat.ort.graph_builder import (
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
)
from onnxtrain.errors import CompatError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify


class DerivativeOptions(enum.IntFlag):
    """What a gradient graph holds."""

    Zero = 0
    KeepYieldOp = 1
    KeepOutputs = 2
    FillGrad = 4
    Loss = 5


def onnx_derivative(
    onx: onnx.ModelProto,
    weights: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | None = None,
    path_name: Any = None,
) -> onnx.ModelProto:
    """Return a graph that computes gradients of a model.

    Its inputs are the model's, the weights, and ``<output>_grad`` for each output; its outputs are
    the gradients of inputs and weights.

    Args:
        onx: a model; it is not changed.
        weights: names of initializers; all float ones unless given.
        inputs: names of inputs; all float ones unless given.
        options: ``KeepOutputs`` gives the model's outputs too; with ``FillGrad`` besides, gradients
            of outputs are ones. ``Loss`` differentiates an output called ``loss``. ``KeepYieldOp``
            has a node ``YieldOp`` instead of inputs for gradients: a function that returns ones.
        loss: the output to differentiate, for ``Loss`` only.
        label: the input that holds labels, for ``Loss`` only: it has no gradient. If the model has
            no such loss, the outputs to differentiate.
        path_name: a file to write the graph to; needed for ``Loss``.
    """
    if not isinstance(options, DerivativeOptions):
        raise TypeError(f"options must be a DerivativeOptions, not {type(options).__name__}")
    if options == DerivativeOptions.Loss:
        return _loss_derivative(onx, weights, loss, label, path_name)
    if options & DerivativeOptions.KeepYieldOp:
        if options != DerivativeOptions.KeepYieldOp:
            raise ValueError("KeepYieldOp must be alone")
        return _with_yield_op(onx, weights, inputs)
    if options & DerivativeOptions.FillGrad and not options & DerivativeOptions.KeepOutputs:
        raise ValueError("FillGrad needs KeepOutputs")
    wrt = _wrt(onx, weights, inputs)
    derivative = vjp(onx, wrt)
    work = ir.from_proto(derivative)
    graph = work.graph
    outputs = list(graph.outputs)
    own = len(onx.graph.output)
    if options & DerivativeOptions.FillGrad:
        _fill_gradients(work, outputs[:own])
    keep = outputs if options & DerivativeOptions.KeepOutputs else outputs[own:]
    graph.outputs.clear()
    graph.outputs.extend(keep)
    result = finalize(simplify(work))
    if path_name is not None:
        onnx.save(result, path_name)
    return result


def _wrt(
    onx: onnx.ModelProto, weights: Sequence[str] | None, inputs: Sequence[str] | None
) -> list[str]:
    graph = ir.from_proto(onx).graph
    own = [x for x in graph.inputs if x.name not in graph.initializers]
    first = [x.name or "" for x in own if S.is_float(x)] if inputs is None else list(inputs)
    return [*first, *(_weights(onx) if weights is None else weights)]


def _with_yield_op(
    onx: onnx.ModelProto, weights: Sequence[str] | None, inputs: Sequence[str] | None
) -> onnx.ModelProto:
    names = _weights(onx) if weights is None else list(weights)
    config = OrtModuleGraphBuilderConfiguration()
    config.initializer_names = config.initializer_names_to_train = names
    config.input_names_require_grad = _wrt(onx, [], inputs)
    builder = OrtModuleGraphBuilder()
    builder.initialize(onx, config)
    builder.build()
    return onnx.load_from_string(builder.get_gradient_model())


def _fill_gradients(work: ir.Model, outputs: Sequence[ir.Value]) -> None:
    """Replace the gradients of the outputs by ones."""
    graph = work.graph
    given = {f"{y.name}_grad": y for y in outputs}
    filled = [x for x in graph.inputs if x.name in given]
    for x in filled:  # before the builder reads sizes from inputs
        graph.inputs.remove(x)
    op = OpBuilder(graph, "fill/")
    for x in filled:
        x.replace_all_uses_with(op.ones_like(given[x.name or ""]))
    graph.sort()


def _loss_derivative(
    onx: onnx.ModelProto, weights: Any, loss: str | None, label: str | None, path_name: Any
) -> onnx.ModelProto:
    if path_name is None or label is None or loss is None:
        raise ValueError("options=Loss needs path_name, label and loss")
    if weights is not None:
        raise ValueError("options=Loss takes all weights: leave weights=None")
    labels = [label] if isinstance(label, str) else list(label)
    if loss not in {y.name for y in onx.graph.output}:
        result = _derivative_of(onx, labels)
    else:
        first = [n for n in _wrt(onx, [], None) if n not in labels]
        work = ir.from_proto(vjp(onx, [*first, *_weights(onx)], loss))
        _fill_gradients(work, [y for y in work.graph.outputs if y.name == loss])
        result = finalize(simplify(work))
    onnx.save(result, path_name)
    return result


def _derivative_of(onx: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Differentiate some outputs of a model without a loss, given their gradients."""
    known = {y.name: y for y in onx.graph.output}
    unknown = [n for n in outputs if n not in known]
    if unknown:
        raise CompatError(
            f"unknown output: {', '.join(unknown)} {expected_one_of(unknown[0], known)}\n"
            "hint: add_loss_output(onx) adds a loss"
        )
    cut = onnx.ModelProto()
    cut.CopyFrom(onx)
    del cut.graph.output[:]
    cut.graph.output.extend(known[n] for n in outputs)
    return vjp(cut, _wrt(onx, None, None))


def _weights(onx: onnx.ModelProto) -> list[str]:
    return [n for n in float_initializers(onx) if not n.startswith(LOSS_PREFIX)]
