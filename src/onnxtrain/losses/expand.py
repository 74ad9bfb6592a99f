"""The standard's label losses in plain operators, after their gradients have been made.

No stock runtime has a kernel for SoftmaxCrossEntropyLoss or NegativeLogLikelihoodLoss: it inlines a
general body of up to 30 nodes when it loads the model. These are fewer, and they share what the
gradient computes, too.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.rules.losses import label_weights
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare import constant_names, mark_constants

_SMALL = 64  # elements of a constant that may be shared


def expand_label_losses(model: ir.Model) -> ir.Model:
    """Replace label losses of the main graph by plain operators, in place; give the model back.

    To be called after differentiation and before ``simplify``: the operators' own gradient rules
    are faster than those of what they are replaced by.
    """
    for node in list(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            known = set(model.graph.initializers)
            _expand(model.graph, node)
            mark_constants(model, set(model.graph.initializers) - known)
    _merge_constants(model)
    return model


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    op = OpBuilder(graph, prefix="loss/", before=node)
    x, labels, weights = (*node.inputs, None)[:3]
    assert x is not None
    assert labels is not None
    options = S.attributes_of(node, op.opset)
    logp = op.LogSoftmax(x, axis=1) if node.op_type == "SoftmaxCrossEntropyLoss" else x
    loss = _loss(op, logp, labels, weights, options["ignore_index"], options["reduction"])
    for old, new in zip(node.outputs, (loss, logp), strict=False):
        _replace(graph, old, new)
    graph.remove(node, safe=True)


def _loss(
    op: OpBuilder,
    logp: ir.Value,
    labels: ir.Value,
    weights: ir.Value | None,
    ignore_index: int | None,
    reduction: str,
) -> ir.Value:
    zero = op.const(0.0, logp.dtype)
    index, ignored, w = label_weights(op, labels, weights, ignore_index, logp.dtype)
    picked = op.GatherElements(logp, op.Unsqueeze(index, [1]), axis=1)
    each = op.Neg(op.Squeeze(picked, [1]))
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
        if x.const_value.size > _SMALL or x.is_graph_output() or x.is_graph_input():
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
