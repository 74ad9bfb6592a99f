"""The standard's label losses in plain operators, after their gradients have been made.

No stock runtime has a kernel for SoftmaxCrossEntropyLoss or NegativeLogLikelihoodLoss: it inlines a
general body of up to 30 nodes when it loads the model. These are fewer, and they share what the
gradient computes, too.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.prepare import constant_names, mark_constants
from onnxtrain.targets import Target

_TINY = 1e-30  # a probability below has few digits, or none, in float32


def expand_label_losses(model: ir.Model, op: OpBuilder) -> int:
    """Replace label losses of the main graph by plain operators; return how many.

    To be called after differentiation and before ``simplify``: the operators' own gradient rules
    are faster than those of what they are replaced by.
    """
    count = 0
    for node in nodes(model.graph, "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        known = set(model.graph.initializers)
        _expand(model.graph, node, op.target)
        count += 1
        mark_constants(model, set(model.graph.initializers) - known)
    _merge_constants(model)
    return count


def _expand(graph: ir.Graph, node: ir.Node, target: Target) -> None:
    op = OpBuilder(graph, prefix="loss/", target=target, before=node)
    x, labels, weights = (*node.inputs, None)[:3]
    assert x is not None
    assert labels is not None
    options = S.attributes_of(node, op.opset)
    exponentials = _exponentials(op, node, x)
    if is_op(node, "NegativeLogLikelihoodLoss"):
        logp = x
    elif exponentials:
        logp = op.Softmax(x, axis=1)
        for exp in exponentials:
            exp.outputs[0].replace_all_uses_with(logp)
        graph.remove(exponentials, safe=True)
    else:
        logp = op.LogSoftmax(x, axis=1)

    def pick(at: ir.Value) -> ir.Value:
        picked = op.Squeeze(op.GatherElements(logp, at, axis=1), [1])
        return _logarithm(op, picked, x, at) if exponentials else picked

    loss = _loss(op, pick, x, labels, weights, options["ignore_index"], options["reduction"])
    for old, new in zip(node.outputs, (loss, logp), strict=False):
        _replace(graph, old, new)
    graph.remove(node, safe=True)


def _exponentials(op: OpBuilder, node: ir.Node, x: ir.Value) -> list[ir.Node]:
    """Return readers of a loss's log-probabilities if all want probabilities: the gradient does.

    onnxruntime's CPU kernel of Softmax costs as much as that of LogSoftmax; an exponential of all
    scores is saved.
    """
    chosen = op.target.prefers("data-dependent-sizes")
    if not chosen or len(node.outputs) < 2 or node.outputs[1].is_graph_output():
        return []
    classes = op.dims(x)[1] if op.rank(x) == 2 else None
    if x.dtype != ir.DataType.FLOAT or not isinstance(classes, int):
        return []
    if classes < T.SOFTMAX_CLASSES:
        return []
    others = [use.node for use in x.uses() if use.node is not node]
    if any(is_op(n, "LogSoftmax", "SoftmaxCrossEntropyLoss") for n in others):
        return []  # a metric computes the logarithms anyway
    readers = [use.node for use in node.outputs[1].uses()]
    plain = all(is_op(n, "Exp") and n.graph is node.graph for n in readers)
    return readers if plain and not any(n.outputs[0].is_graph_output() for n in readers) else []


def _logarithm(op: OpBuilder, p: ir.Value, x: ir.Value, at: ir.Value) -> ir.Value:
    """Return the logarithms of the labels' probabilities, exact for tiny and vanished ones, too.

    Those rows, in most batches none, are computed again with LogSoftmax.
    """
    rows = op.Reshape(op.NonZero(op.Less(p, _TINY)), [-1])
    logp = op.LogSoftmax(op.Gather(x, rows, axis=0), axis=1)
    exact = op.Squeeze(op.GatherElements(logp, op.Gather(at, rows, axis=0), axis=1), [1])
    return op.ScatterElements(op.Log(p), rows, exact, axis=0)


def label_weights(
    op: OpBuilder,
    labels: ir.Value,
    weights: ir.Value | None,
    ignore_index: int | None,
    dtype: ir.DataType | None,
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Return labels with 0 for ignored ones, where those are, and the ``w_n`` unless all are 1."""
    index, ignored, w = labels, None, None
    if ignore_index is not None:
        ignored = op.Equal(labels, ignore_index)
        index = op.Where(ignored, 0, labels)
    if weights is not None:
        w = op.Gather(weights, index)
    if ignored is not None:
        w = op.Where(ignored, op.const(0.0, dtype), op.const(1.0, dtype) if w is None else w)
    return index, ignored, w


def _loss(
    op: OpBuilder,
    pick: Callable[[ir.Value], ir.Value],
    x: ir.Value,
    labels: ir.Value,
    weights: ir.Value | None,
    ignore_index: int | None,
    reduction: str,
) -> ir.Value:
    zero = op.const(0.0, x.dtype)
    index, ignored, w = label_weights(op, labels, weights, ignore_index, x.dtype)
    each = op.Neg(pick(op.Unsqueeze(index, [1])))
    if weights is not None:
        each = op.Mul(each, w)
    if ignored is not None:
        each = op.Where(ignored, zero, each)
    if reduction == "none":
        return each
    if reduction == "mean" and w is None:
        return op.ReduceMean(each, keepdims=0)
    total = op.ReduceSum(each, keepdims=0)
    return total if reduction == "sum" else op.Div(total, op.ReduceSum(w, keepdims=0))


def _merge_constants(model: ir.Model) -> None:
    """Keep one of equal small constants: only then equal nodes have equal inputs."""
    marked, first = constant_names(model), {}
    for name, x in list(model.graph.initializers.items()):
        if not (name in marked or name.startswith("grad/")) or x.const_value is None:
            continue
        if x.is_graph_output() or x.is_graph_input():
            continue
        if x.const_value.size > T.SHARED_CONSTANT_ELEMENTS:
            continue
        key = (x.dtype, tuple(x.const_value.shape), x.const_value.tobytes())
        kept = first.setdefault(key, x)
        if kept is not x:
            x.replace_all_uses_with(kept)
            del model.graph.initializers[name]


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if old.is_graph_output() or name is None:
        return
    new.shape = old.shape if new.shape is None else new.shape
    if any(y is new for y in graph.outputs):
        old.name, new.name = f"{name}.expanded", name
