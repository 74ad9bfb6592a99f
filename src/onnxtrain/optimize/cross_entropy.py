"""Rewrites of cross entropy: label losses, their gradient in 16 bits, and padded vocabularies.

- `expand_label_losses`: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss become plain
  operators after differentiation.
- `narrow_cross_entropy_grad` (CUDA, bf16-mixed): the gradient is cast before 1 is subtracted at
  the labels, not after.
- `pad_vocabulary` (CUDA): weights of the last layer get columns for classes that never win, so that
  rows are aligned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.match import Match, checked
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.importer import constant_names, mark_constants
from onnxtrain.targets import Target

# Label losses.

_TINY = 1e-30  # probabilities below this have few significant digits, or none, in float32


def expand_label_losses(model: ir.Model, op: OpBuilder) -> int:
    """Replace label losses of the main graph with plain operators; return how many.

    Stock onnxruntime has no kernels for these operators and inlines a body of up to 30 nodes. The
    nodes here are fewer, and the gradient shares some of them:

        before:  loss, logp = SoftmaxCrossEntropyLoss(x, labels);  p = Exp(logp)
        after:   p = Softmax(x);  loss = mean(-log(p[labels]))

    Runs after differentiation, because the operators' own gradient rules are faster than those of
    the expansion, and before `simplify`, which merges nodes with those of the gradient.
    """
    count = 0
    for node in nodes(model.graph, "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        existing = set(model.graph.initializers)
        _expand_loss(model.graph, node, op.target)
        count += 1
        mark_constants(model, set(model.graph.initializers) - existing)
    _merge_constants(model)
    return count


def _expand_loss(graph: ir.Graph, node: ir.Node, target: Target) -> None:
    op = OpBuilder(graph, prefix="loss/", target=target, before=node)
    x, labels, weights = (*node.inputs, None)[:3]
    assert x is not None
    assert labels is not None
    options = S.attributes_of(node, op.opset)
    exponentials = _gradient_exponentials(op, node, x)
    if is_op(node, "NegativeLogLikelihoodLoss"):
        logp = x
    elif exponentials:
        logp = op.Softmax(x, axis=1)
        for exp in exponentials:
            exp.outputs[0].replace_all_uses_with(logp)
        graph.remove(exponentials, safe=True)
    else:
        logp = op.LogSoftmax(x, axis=1)

    def log_probability(index: ir.Value) -> ir.Value:
        picked = op.Squeeze(op.GatherElements(logp, index, axis=1), [1])
        return _exact_log(op, picked, x, index) if exponentials else picked

    loss = _reduced_loss(
        op, log_probability, x, labels, weights, options["ignore_index"], options["reduction"]
    )
    for old, new in zip(node.outputs, (loss, logp), strict=False):
        _replace(graph, old, new)
    graph.remove(node, safe=True)


def _gradient_exponentials(op: OpBuilder, node: ir.Node, x: ir.Value) -> list[ir.Node]:
    """Return the Exp nodes that read a loss's log-probabilities, if nothing else reads these.

    The gradient needs probabilities. Softmax costs as much as LogSoftmax on the CPU, so computing
    probabilities directly saves an exponential of all scores.
    """
    if not op.target.prefers("data-dependent-shapes"):
        return []
    if len(node.outputs) < 2 or node.outputs[1].is_graph_output():
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
    only_exp = all(is_op(n, "Exp") and n.graph is node.graph for n in readers)
    return readers if only_exp and not any(n.outputs[0].is_graph_output() for n in readers) else []


def _exact_log(op: OpBuilder, p: ir.Value, x: ir.Value, index: ir.Value) -> ir.Value:
    """Return the logarithms of the labels' probabilities, also of those that underflow.

    LogSoftmax recomputes rows with tiny probabilities; most batches have none.
    """
    rows = op.Reshape(op.NonZero(op.Less(p, _TINY)), [-1])
    logp = op.LogSoftmax(op.Gather(x, rows, axis=0), axis=1)
    exact = op.Squeeze(op.GatherElements(logp, op.Gather(index, rows, axis=0), axis=1), [1])
    return op.ScatterElements(op.Log(p), rows, exact, axis=0)


def label_weights(
    op: OpBuilder,
    labels: ir.Value,
    weights: ir.Value | None,
    ignore_index: int | None,
    dtype: ir.DataType | None,
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Return labels with ignored ones set to 0, which are ignored, and weights unless all are 1."""
    index, ignored, w = labels, None, None
    if ignore_index is not None:
        ignored = op.Equal(labels, ignore_index)
        index = op.Where(ignored, 0, labels)
    if weights is not None:
        w = op.Gather(weights, index)
    if ignored is not None:
        w = op.Where(ignored, op.const(0.0, dtype), op.const(1.0, dtype) if w is None else w)
    return index, ignored, w


def _reduced_loss(
    op: OpBuilder,
    log_probability: Callable[[ir.Value], ir.Value],
    x: ir.Value,
    labels: ir.Value,
    weights: ir.Value | None,
    ignore_index: int | None,
    reduction: str,
) -> ir.Value:
    zero = op.const(0.0, x.dtype)
    index, ignored, w = label_weights(op, labels, weights, ignore_index, x.dtype)
    each = op.Neg(log_probability(op.Unsqueeze(index, [1])))
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
    """Merge equal small constants, so that nodes which compute the same have the same inputs."""
    marked, first = constant_names(model), {}
    for name, x in list(model.graph.initializers.items()):
        if not (name in marked or name.startswith("grad/")) or x.const_value is None:
            continue
        if x.is_graph_output() or x.is_graph_input():
            continue
        if x.const_value.size > T.SHARED_CONSTANT_ELEMENTS:
            continue
        key = (x.dtype, tuple(x.const_value.shape), x.const_value.tobytes())
        same = first.setdefault(key, x)
        if same is not x:
            x.replace_all_uses_with(same)
            del model.graph.initializers[name]


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if old.is_graph_output() or name is None:
        return
    new.shape = old.shape if new.shape is None else new.shape
    if any(y is new for y in graph.outputs):
        old.name, new.name = f"{name}.expanded", name


# The gradient in 16 bits.

_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})


def narrow_cross_entropy_grad(model: ir.Model, op: OpBuilder) -> int:
    """Cast cross entropy's gradient to 16 bits before the labels are marked; return how many.

        before:  Cast(ScatterElements(p, labels, p[labels] - 1))
        after:   ScatterElements(Cast(p), labels, Cast(p[labels] - 1))

    ScatterElements copies all elements, so casting first halves what is copied. The difference at
    the label stays in float32: `p` may be so close to 1 that 16 bits cannot hold it.
    """
    changed = 0
    for node in nodes(op.graph, "ScatterElements"):
        match = _softmax_minus_one.match(node)
        casts = [] if match is None else _casts_to_half(node.outputs[0])
        if match is None or not casts:
            continue
        axis, kind = S.attributes_of(node, op.opset)["axis"], casts[0].outputs[0].dtype
        op.position = node
        probabilities, at_label = op.Cast(match["p"], to=kind), op.Cast(match["less"], to=kind)
        grad = op.ScatterElements(probabilities, match["index"], at_label, axis=axis)
        for cast in casts:
            y = cast.outputs[0]
            replace_value(y, grad, list(y.uses()))
        changed += 1
    return changed


def _check_axes(match: Match) -> bool | str:
    axes = {n.attributes.get_int("axis", 0) for n in (match.root, match.node("picked"))}
    return len(axes) == 1 or "gather and scatter have different axes"


@checked(_check_axes)
def _softmax_minus_one(op, logp, index):
    p = op.Exp(logp).named("p")
    less = op.Sub(op.GatherElements(p, index).named("picked"), 1.0).named("less")
    return op.ScatterElements(p, index, less, reduction=lambda kind: kind in (None, "none"))


def _casts_to_half(x: ir.Value) -> list[ir.Node]:
    """Return the casts that read a value, if all are to the same 16-bit type."""
    readers = [use.node for use in x.uses() if _is_live(use.node)]
    kinds = {n.outputs[0].dtype for n in readers}
    if x.is_graph_output() or len(kinds) != 1 or not kinds <= _HALF:
        return []
    return readers if all(is_op(n, "Cast") for n in readers) else []


def _is_live(node: ir.Node) -> bool:
    """Return whether anything reads a node; earlier passes leave dead casts behind."""
    return any(y.uses() or y.is_graph_output() for y in node.outputs)


# Padded vocabularies.

_ALIGNMENT = 8  # elements; CUDA's fast matmul kernels need rows of whole 128-bit words
_MASKED_LOGIT = -1e30  # its exponential is zero next to any score, also in 16 bits


def pad_vocabulary(model: ir.Model, op: OpBuilder) -> int:
    """Pad the classes of losses to a multiple of eight; return how many losses changed.

        before:  x W^T                      W: [classes, width]
        after:   [x, 1] [W, 0; 0, -1e30]^T  with up to seven more rows

    CUDA takes up to twice as long for the three matmuls of a vocabulary of 50,257 as for 50,264.
    The extra rows read only the appended ones of the input, so their logits are -1e30, their
    probability is zero, and no gradient comes back. They are constants, not parameters.
    """
    return sum(_pad_classes(op, node) for node in nodes(op.graph, "SoftmaxCrossEntropyLoss"))


@dataclasses.dataclass(frozen=True)
class _ScoreHead:
    """The matmul that computes the logits of a loss.

    Attributes:
        matmul: the matmul.
        transpose: the node that transposes a weight [classes, width], or None.
        weight: the parameter.
        width: features of the input.
        classes: logits per row.
        views: reshapes and casts between the matmul and the loss.
        casts: values of the transposed weight in other types.
    """

    matmul: ir.Node
    transpose: ir.Node | None
    weight: ir.Value
    width: int
    classes: int
    views: list[ir.Node]
    casts: list[ir.Value]


def _pad_classes(op: OpBuilder, loss: ir.Node) -> int:
    head = _find_score_head(loss)
    if head is None:
        return 0
    more, extra_width = -head.classes % _ALIGNMENT, _ALIGNMENT + -head.width % _ALIGNMENT
    op.position = head.transpose or head.matmul
    assert head.weight.dtype is not None
    rows = np.zeros((more, head.width + extra_width))
    rows[:, head.width] = _MASKED_LOGIT
    if head.transpose is not None:
        weight = op.Pad(head.weight, [0, 0, 0, extra_width])
        weight = op.Concat(weight, op.const(rows, head.weight.dtype), axis=0)
        head.transpose.replace_input_with(0, weight)
        for transposed in (head.transpose.outputs[0], *head.casts):
            _set_dims(transposed, [head.width + extra_width, head.classes + more])
    else:
        weight = op.Pad(head.weight, [0, 0, extra_width, 0])
        weight = op.Concat(weight, op.const(rows.T, head.weight.dtype), axis=1)
        head.matmul.replace_input_with(1, weight)
    op.position = head.matmul
    x = head.matmul.inputs[0]
    assert x is not None
    pads, kind = [0] * (2 * op.rank(x) - 1), x.dtype
    if kind == ir.DataType.BFLOAT16:  # CUDA has no Pad kernel for bfloat16
        padded = op.Pad(op.Cast(x, to=ir.DataType.FLOAT), [*pads, extra_width], 1.0)
        head.matmul.replace_input_with(0, op.Cast(padded, to=kind))
    else:
        head.matmul.replace_input_with(0, op.Pad(x, [*pads, extra_width], op.const(1.0, kind)))
    _set_dims(head.matmul.outputs[0], [*(S.dims_of(x) or ())[:-1], head.classes + more])
    for view in head.views:
        _pad_view(op, view, head.classes, head.classes + more)
    return 1


def _find_score_head(loss: ir.Node) -> _ScoreHead | None:
    """Return the matmul that computes the logits of a loss, if nothing else reads them."""
    if len(loss.inputs) > 2 and loss.inputs[2] is not None:
        return None
    logits, views = loss.inputs[0], []
    while logits is not None:
        readers = {use.node for use in logits.uses() if _is_live(use.node)}
        node = logits.producer()
        if len(readers) != 1 or logits.is_graph_output() or node is None:
            return None
        if not is_op(node, "Reshape", "Cast"):
            return _score_head(node, loss, views)
        views.append(node)
        logits = node.inputs[0]
    return None


def _score_head(node: ir.Node, loss: ir.Node, views: list[ir.Node]) -> _ScoreHead | None:
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
    while (cast := weight.producer()) is not None and is_op(cast, "Cast"):
        if len(weight.uses()) != 1 or cast.inputs[0] is None:
            return None
        casts.append(weight)
        weight = cast.inputs[0]
    transpose = weight.producer()
    if transpose is not None:
        if not is_op(transpose, "Transpose") or len(weight.uses()) != 1:
            return None
        weight = transpose.inputs[0]
    sizes = None if weight is None else S.dims_of(weight)
    if weight is None or sizes is None or len(sizes) != 2:
        return None
    width = sizes[1] if transpose is not None else sizes[0]
    if not isinstance(width, int) or sizes[0 if transpose is not None else 1] != classes:
        return None
    if casts and transpose is None:
        return None
    return _ScoreHead(node, transpose, weight, width, classes, views, casts)


def _keeps_last_axis(view: ir.Node, classes: int) -> bool:
    """Return whether the last element of a Reshape's shape is the classes, or -1."""
    shape = S.constant_of(view.inputs[1])
    return shape is not None and shape.size > 1 and shape.ravel()[-1] in (classes, -1)


def _pad_view(op: OpBuilder, view: ir.Node, classes: int, padded: int) -> None:
    y = view.outputs[0]
    if is_op(view, "Reshape"):
        shape = S.constant_of(view.inputs[1])
        assert shape is not None
        sizes = [int(d) for d in shape.ravel()]
        if sizes[-1] == classes:
            op.position = view
            view.replace_input_with(1, op.const([*sizes[:-1], padded]))
    _set_dims(y, [*(S.dims_of(y) or ())[:-1], padded])


def _set_dims(x: ir.Value, dims: Sequence[Dim]) -> None:
    S.set_dims(x, tuple(dims))
