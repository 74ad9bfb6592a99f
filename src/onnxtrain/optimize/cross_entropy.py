"""The standard's label losses in plain operators, after their gradients have been made.

No stock runtime has a kernel for SoftmaxCrossEntropyLoss or NegativeLogLikelihoodLoss: it inlines a
general body of up to 30 nodes when it loads the model. These are fewer, and they share what the
gradient computes, too.

Cross entropy's gradient rounded to 16 bits before the labels are marked in it, not behind.

With ``bf16-mixed`` the gradient of the scores of a large vocabulary is ``p`` less one at the label,
made in float32 and rounded in the end. To replace one element per row a kernel copies all others,
so they are rounded first: half as much is copied. At the label the difference is still taken in
float32: there ``p`` may be so near one that 16 bits know no difference.

Scores of many classes, so many that kernels can read them in whole words.

A product whose rows are no multiple of eight numbers long has a slow kernel on a GPU, and so have
both products of its gradient: a vocabulary of 50,257 words costs up to twice the time of one of
50,264. So the weight gets rows for a few classes more, whose scores are so low that their
probability is zero and nothing comes back from them. The rows are no parameters: each of them reads
one number that is put behind every row of the input, and is always 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.importer import constant_names, mark_constants
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
        _decompose_loss(model.graph, node, op.target)
        count += 1
        mark_constants(model, set(model.graph.initializers) - known)
    _merge_constants(model)
    return count


def _decompose_loss(graph: ir.Graph, node: ir.Node, target: Target) -> None:
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
    chosen = op.target.prefers("data-dependent-shapes")
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


_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})


def narrow_cross_entropy_grad(model: ir.Model, op: OpBuilder) -> int:
    """Let labels be marked in 16 bits, in place; return in how many gradients."""
    changed = 0
    for node in nodes(op.graph, "ScatterElements"):
        slope = _find_cross_entropy_grad(node)
        if slope is not None:
            _cast_before_scatter(op, slope)
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _CrossEntropyGrad:
    """Probabilities of which one per row is replaced, and the type that all are rounded to."""

    scatter: ir.Node
    casts: list[ir.Node]
    kind: ir.DataType


def _find_cross_entropy_grad(scatter: ir.Node) -> _CrossEntropyGrad | None:
    y = scatter.outputs[0]
    how = scatter.attributes.get("reduction")
    if y.is_graph_output() or (how is not None and how.as_string() != "none"):
        return None
    casts = [use.node for use in y.uses() if not _is_dead(use.node)]
    kinds = {n.outputs[0].dtype for n in casts if is_op(n, "Cast")}
    if len(kinds) != 1 or not all(is_op(n, "Cast") for n in casts) or not kinds <= _HALF:
        return None
    (kind,) = kinds
    if kind is None or _producer_of_type(scatter.inputs[0], "Exp") is None:
        return None
    if not _is_minus_one_at_labels(
        scatter.inputs[2], scatter.inputs[0], scatter.inputs[1], scatter
    ):
        return None
    return _CrossEntropyGrad(scatter, casts, kind)


def _is_dead(node: ir.Node) -> bool:
    """Return whether nobody reads a node any more: passes before this one leave such behind."""
    return not any(y.uses() or y.is_graph_output() for y in node.outputs)


def _producer_of_type(x: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if x is None else x.producer()
    return node if node is not None and is_op(node, op_type) else None


def _is_minus_one_at_labels(
    x: ir.Value | None, p: ir.Value | None, at: ir.Value | None, scatter: ir.Node
) -> bool:
    """Return whether a value is what ``p`` has at the places, less one."""
    sub = _producer_of_type(x, "Sub")
    gather = None if sub is None else _producer_of_type(sub.inputs[0], "GatherElements")
    one = None if sub is None else S.constant_of(sub.inputs[1])
    if gather is None or one is None or one.size != 1 or one.item() != 1.0:
        return False
    axes = [
        n.attributes["axis"].as_int() if "axis" in n.attributes else 0 for n in (gather, scatter)
    ]
    return gather.inputs[0] is p and gather.inputs[1] is at and axes[0] == axes[1]


def _cast_before_scatter(op: OpBuilder, slope: _CrossEntropyGrad) -> None:
    p, at, less = slope.scatter.inputs[:3]
    assert p is not None
    assert less is not None
    axis = S.attributes_of(slope.scatter, op.opset)["axis"]
    op.position = slope.scatter
    rounded, label = op.Cast(p, to=slope.kind), op.Cast(less, to=slope.kind)
    new = op.ScatterElements(rounded, at, label, axis=axis)
    for cast in slope.casts:
        y = cast.outputs[0]
        replace_value(y, new, list(y.uses()))


_ALIGNMENT = 8
_MASKED_LOGIT = -1e30  # its exponential is zero beside any score, also in 16 bits


def pad_vocabulary(model: ir.Model, op: OpBuilder) -> int:
    """Add classes to losses over a number of them that is no multiple of eight; return how many."""
    return sum(_pad_classes(op, node) for node in nodes(op.graph, "SoftmaxCrossEntropyLoss"))


@dataclasses.dataclass(frozen=True)
class _ScoreHead:
    """The product that makes the scores of a loss, and what gives them another shape on the way."""

    product: ir.Node
    transposed: ir.Node | None
    """What turns the weight ``[classes, width]``; without it, it is ``[width, classes]``."""
    weight: ir.Value
    width: int
    classes: int
    views: list[ir.Node]
    casts: list[ir.Value]
    """The turned weight in other types."""


def _pad_classes(op: OpBuilder, loss: ir.Node) -> int:
    head = _find_score_head(loss)
    if head is None:
        return 0
    more, wider = -head.classes % _ALIGNMENT, _ALIGNMENT + -head.width % _ALIGNMENT
    op.position = head.transposed or head.product
    assert head.weight.dtype is not None
    rows = np.zeros((more, head.width + wider))
    rows[:, head.width] = _MASKED_LOGIT
    if head.transposed is not None:
        weight = op.Pad(head.weight, [0, 0, 0, wider])
        weight = op.Concat(weight, op.const(rows, head.weight.dtype), axis=0)
        head.transposed.replace_input_with(0, weight)
        for turned in (head.transposed.outputs[0], *head.casts):
            _set_dims(turned, [head.width + wider, head.classes + more])
    else:
        weight = op.Pad(head.weight, [0, 0, wider, 0])
        weight = op.Concat(weight, op.const(rows.T, head.weight.dtype), axis=1)
        head.product.replace_input_with(1, weight)
    op.position = head.product
    x = head.product.inputs[0]
    assert x is not None
    pads, kind = [0] * (2 * op.rank(x) - 1), x.dtype
    if kind == ir.DataType.BFLOAT16:  # CUDA pads none
        wide = op.Pad(op.Cast(x, to=ir.DataType.FLOAT), [*pads, wider], 1.0)
        head.product.replace_input_with(0, op.Cast(wide, to=kind))
    else:
        head.product.replace_input_with(0, op.Pad(x, [*pads, wider], op.const(1.0, kind)))
    _set_dims(head.product.outputs[0], [*(S.dims_of(x) or ())[:-1], head.classes + more])
    for view in head.views:
        _pad_view(op, view, head.classes, head.classes + more)
    return 1


def _find_score_head(loss: ir.Node) -> _ScoreHead | None:
    """Return what makes the scores of a loss, if nothing else reads them."""
    if len(loss.inputs) > 2 and loss.inputs[2] is not None:
        return None
    scores, views = loss.inputs[0], []
    while scores is not None:
        readers = {use.node for use in scores.uses() if _is_read(use.node)}
        node = scores.producer()
        if len(readers) != 1 or scores.is_graph_output() or node is None:
            return None
        if not is_op(node, "Reshape", "Cast"):
            return _product(node, loss, views)
        views.append(node)
        scores = node.inputs[0]
    return None


def _is_read(node: ir.Node) -> bool:
    """Return whether anything comes of a node; casts that nothing reads are left over."""
    return any(y.is_graph_output() or y.uses() for y in node.outputs)


def _product(node: ir.Node, loss: ir.Node, views: list[ir.Node]) -> _ScoreHead | None:
    dims = None if loss.inputs[0] is None else S.dims_of(loss.inputs[0])
    weight = node.inputs[1] if is_op(node, "MatMul") else None
    if weight is None or dims is None or len(dims) != 2 or node.graph is not loss.graph:
        return None
    classes = dims[1]
    if (
        not isinstance(classes, int)
        or classes % _ALIGNMENT == 0
        or classes < T.PADDED_VOCABULARY_CLASSES
    ):
        return None
    if any(is_op(v, "Reshape") and not _keeps_last_axis(v, classes) for v in views):
        return None
    casts = []
    while (node_of := weight.producer()) is not None and is_op(node_of, "Cast"):
        if len(weight.uses()) != 1 or node_of.inputs[0] is None:
            return None
        casts.append(weight)
        weight = node_of.inputs[0]
    transposed = weight.producer()
    if transposed is not None:
        if not is_op(transposed, "Transpose") or len(weight.uses()) != 1:
            return None
        weight = transposed.inputs[0]
    sizes = None if weight is None else S.dims_of(weight)
    if weight is None or sizes is None or len(sizes) != 2:
        return None
    width = sizes[1] if transposed is not None else sizes[0]
    if not isinstance(width, int) or sizes[0 if transposed is not None else 1] != classes:
        return None
    if casts and transposed is None:
        return None
    return _ScoreHead(node, transposed, weight, width, classes, views, casts)


def _keeps_last_axis(view: ir.Node, classes: int) -> bool:
    """Return whether a Reshape leaves the last axis alone, and says so by its number."""
    shape = S.constant_of(view.inputs[1])
    return shape is not None and shape.size > 1 and shape.ravel()[-1] in (classes, -1)


def _pad_view(op: OpBuilder, view: ir.Node, classes: int, wider: int) -> None:
    y = view.outputs[0]
    if is_op(view, "Reshape"):
        shape = S.constant_of(view.inputs[1])
        assert shape is not None
        sizes = [int(d) for d in shape.ravel()]
        if sizes[-1] == classes:
            op.position = view
            view.replace_input_with(1, op.const([*sizes[:-1], wider]))
    _set_dims(y, [*(S.dims_of(y) or ())[:-1], wider])


def _set_dims(x: ir.Value, dims: Sequence[Dim]) -> None:
    S.set_dims(x, tuple(dims))
