"""Training and evaluation mode of BatchNormalization and Dropout.

First the statistics of BatchNormalization. In training mode the operator returns ``momentum * old
+ (1 - momentum) * batch`` for mean and variance, so with momentum 0 it returns the batch's mean
and (population) variance. ``running_statistics`` sets momentum 0 on targets that prefer it and
averages behind the node; the gradient rule then reads the batch statistics from the node's outputs
instead of recomputing them. ``mean_and_variance`` computes them where no kernel does.

Then the switches ``to_training`` and ``to_evaluation``, and ``sizes_above_one``:
BatchNormalization in training mode needs more than one value per channel, because the variance of
a single value is 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D

_BATCH_ONLY = 0.0
_DEFAULT_MOMENTUM = 0.9  # in the ONNX schema
_LAYOUT_OPS = (
    *("Cast", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze"),
)


def momentum_of(node: ir.Node) -> float:
    """Return the momentum of a BatchNormalization: the weight of the old statistics."""
    momentum = node.attributes.get("momentum")
    return _DEFAULT_MOMENTUM if momentum is None else momentum.as_float()


def request_batch_statistics(node: ir.Node) -> None:
    """Make a BatchNormalization return the batch statistics (momentum 0)."""
    node.attributes["momentum"] = ir.AttrFloat32("momentum", _BATCH_ONLY)


def has_batch_statistics(node: ir.Node) -> bool:
    """Return whether outputs 1 and 2 of a training node are the batch's mean and variance."""
    return momentum_of(node) == _BATCH_ONLY


def prefers_fused_kernel(op: OpBuilder, x: ir.Value) -> bool:
    """Return whether a normalization kernel is faster than elementwise operators.

    Always on CPUs; on GPUs for large images.
    """
    if x.dtype != ir.DataType.FLOAT:
        return False
    return not op.target.gpu or _large(op, x)


def _large(op: OpBuilder, x: ir.Value) -> bool:
    sizes = D.static_sizes(op.dims(x)[2:])
    return bool(sizes) and math.prod(sizes or ()) >= T.NORM_KERNEL_POSITIONS


def is_layer_output(x: ir.Value) -> bool:
    """Return whether a value is the float32 output of a layer with weights.

    The mean of such values is rarely orders of magnitude above their deviation, so products of
    uncentered values keep their digits. Graph inputs may be years or prices.
    """
    layer = x.producer()
    if layer is None or x.dtype != ir.DataType.FLOAT:
        return False
    return is_op(layer, "Conv", "ConvTranspose", "Gemm", "MatMul")


def layer_reads_graph_input(x: ir.Value) -> bool:
    """Return whether the layer behind a value reads a graph input without padding.

    Its weight gradient multiplies the mean of that input by the sum of a gradient, which is zero up
    to rounding. Padding breaks that relation.
    """
    layer = x.producer()
    source = None if layer is None else layer.inputs[0]
    while source is not None and (node := source.producer()) is not None:
        if not is_op(node, *_LAYOUT_OPS):
            return False
        source = node.inputs[0]
    if layer is None or source is None or not source.is_graph_input():
        return False
    pads, auto = (layer.attributes.get(name) for name in ("pads", "auto_pad"))
    padded = (pads is not None and any(pads.as_ints())) or (
        auto is not None and auto.as_string().startswith("SAME")
    )
    return not padded


class BatchNormParameters(NamedTuple):
    """The per-channel inputs of BatchNormalization."""

    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value


def normalize(op: OpBuilder, x: ir.Value, given: BatchNormParameters, epsilon: float) -> ir.Value:
    """Return ``scale * (x - mean) / sqrt(variance + epsilon) + bias``.

    By the operator, or as ``x * factor + (bias - mean * factor)`` where that is faster.
    """
    if prefers_fused_kernel(op, x):
        return op.BatchNormalization(x, *given, epsilon=epsilon)
    factor = op.Div(given.scale, op.Sqrt(op.Add(given.variance, epsilon)))
    offset = op.Sub(given.bias, op.Mul(given.mean, factor))
    column = [-1, *[1] * (op.rank(x) - 2)]
    return op.Add(op.Mul(x, op.Reshape(factor, column)), op.Reshape(offset, column))


def mean_and_variance(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the mean and population variance of each channel as ``[C, 1, ...]``.

    float32 also for bfloat16 images.
    """
    rank = op.rank(x)
    axes = [i for i in range(rank) if i != 1]
    sizes = D.static_sizes(op.dims(x)[2:])
    half = x.dtype == ir.DataType.BFLOAT16
    kernel = _large(op, x) if half else prefers_fused_kernel(op, x)
    if op.target.prefers("batch-stats-via-layer-norm") and sizes and kernel:
        mean, var = _combine_statistics(op, x, math.prod(sizes))
        column = [-1, *[1] * (rank - 2)]
        return op.Reshape(mean, column), op.Reshape(var, column)
    x = op.cast(x, ir.DataType.FLOAT) if half else x
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    return mean, op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)


def _combine_statistics(op: OpBuilder, x: ir.Value, positions: int) -> tuple[ir.Value, ir.Value]:
    """Return the statistics of a batch from those of its images.

    LayerNormalization computes the mean and ``1 / deviation`` of an image in one pass; its output Y
    is not used. The batch variance is the mean of ``var + (mean - mean of means)^2``.
    """
    images = op.Reshape(x, [0, 0, positions])
    one = op.const(np.ones(positions), x.dtype)
    y, means, r = op.LayerNormalization(images, one, axis=2, epsilon=0.0, _outputs=3)
    # onnxruntime frees a value after its last reader. Without one, Y would live until the run ends.
    unread = op.Slice(y, [0, 0, 0], [1, 1, 1], [0, 1, 2])
    means = op.Where(op.const([False]), op.cast(unread, means.dtype), means)
    mean = op.ReduceMean(means, [0], keepdims=1)
    away = op.Sub(means, mean)
    # For an image of equal values r is infinite and this is 0.
    spread = op.Reciprocal(op.Mul(r, r))
    return mean, op.ReduceMean(op.Add(spread, op.Mul(away, away)), [0], keepdims=1)


_MODES_SINCE = 14  # the first opset with BatchNormalization.training_mode


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A running statistic: its value before and after a step."""

    name: str
    old: ir.Value
    new: ir.Value


def to_training(model: ir.Model, *, trainable: set[str]) -> list[str]:
    """Switch BatchNormalization with trainable scale, and Dropout, to training mode, in place.

    Args:
        model: a prepared model.
        trainable: names of the parameters to train.

    Returns:
        One report line per kind of change.
    """
    changed, inside = {"BatchNormalization": 0, "Dropout": 0}, 0
    for node in nodes(model.graph, *changed, subgraphs=True):
        if node.op_type == "BatchNormalization":
            scale = node.inputs[1]
            if scale is None or scale.name not in trainable or _int(node, "training_mode"):
                continue
            if node.graph is not model.graph:
                inside += 1  # updated statistics cannot leave the body
                continue
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            changed["BatchNormalization"] += 1
        elif node.op_type == "Dropout" and not _always_on(node):
            op = OpBuilder(model.graph, "mode/")
            ratio = node.inputs[1] if len(node.inputs) > 1 else None
            node.resize_inputs(3)
            if ratio is None:
                node.replace_input_with(1, op.const(0.5, ir.DataType.FLOAT))
            node.replace_input_with(2, op.const(True))
            changed["Dropout"] += 1
    lines = [f"{kind} put into training mode: {n} node(s)" for kind, n in changed.items() if n]
    if inside:
        lines.append(f"BatchNormalization in a loop or branch left on its statistics: {inside}")
    return lines


def to_evaluation(model: ir.Model) -> list[str]:
    """Switch BatchNormalization to its running statistics and remove Dropout, in place.

    Also for models that are not prepared: before opset 14, training mode means several outputs.
    """
    changed = {"BatchNormalization": 0, "Dropout": 0}
    old = model.opset_imports.get("", 0) < _MODES_SINCE
    for node in nodes(model.graph, *changed, subgraphs=True):
        if node.op_type == "BatchNormalization" and (
            _int(node, "training_mode") or (old and len(node.outputs) > 1)
        ):
            _restore_statistics(node)
            changed["BatchNormalization"] += 1
        elif node.op_type == "Dropout":
            _bypass(node)
            changed["Dropout"] += 1
    return [f"{kind} put into evaluation mode: {n} node(s)" for kind, n in changed.items() if n]


def unshare_running_statistics(model: ir.Model) -> list[str]:
    """Give running statistics that share an initializer their own copy, in place.

    Exporters that deduplicate equal tensors store an initial running variance and an initial scale
    as one initializer, since both are ones.

    Returns:
        A report line if something changed.
    """
    graph, changed = model.graph, 0
    for node in nodes(graph, "BatchNormalization", subgraphs=True):
        for i, kind in ((3, "running_mean"), (4, "running_var")):
            x = node.inputs[i]
            if x is None or not x.is_initializer() or x.const_value is None:
                continue
            if all(_is_statistic(use.node, use.idx, i) for use in x.uses()):
                continue
            scale = node.inputs[1]
            stem = ((scale.name if scale is not None else "") or "norm").removesuffix(".weight")
            own = ir.Value(
                name=OpBuilder(graph).names.fresh(f"{stem}.{kind}"),
                type=x.type,
                shape=x.shape,
                const_value=ir.Tensor(x.const_value.numpy(), dtype=x.dtype),
            )
            graph.register_initializer(own)
            node.replace_input_with(i, own)
            changed += 1
    return [f"statistics stored apart from parameters: {changed}"] if changed else []


def _is_statistic(node: ir.Node, index: int, wanted: int) -> bool:
    return is_op(node, "BatchNormalization") and index == wanted


def running_statistics(model: ir.Model, op: OpBuilder, *, unbiased: bool = True) -> list[Buffer]:
    """Return the running statistics that training-mode BatchNormalization updates.

    ONNX averages the biased variance; ``unbiased`` scales the batch variance by n / (n - 1), as
    torch does. Statistics shared by several nodes are updated by each in turn.

    onnxruntime overwrites the input statistics in place, wherever they come from. So each node
    reads zeros of its own and returns the contribution of the batch only: with momentum 0 the
    batch statistics, which the gradient reads, too; else ``(1 - momentum)`` times them.
    """
    graph = model.graph
    newest: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, ir.Value] = {}
    for node in nodes(graph, "BatchNormalization"):
        if not _int(node, "training_mode"):
            continue
        kept, part = momentum_of(node), 1.0
        if op.target.prefers("batch-statistics-output"):
            part = 1.0 - kept
            request_batch_statistics(node)
        _name_statistics(op, node)
        for i, out in ((3, 1), (4, 2)):
            old = node.inputs[i]
            if old is None or not old.is_initializer():
                continue
            inside = op.before(node)
            # Derived from the previous contribution: onnxruntime would merge equal expressions.
            node.replace_input_with(i, inside.Mul(last.get(old, old), 0.0))
            share = last[old] = node.outputs[out]
            before = op.Mul(newest.get(old, old), kept)
            if share.uses() or share.is_graph_output():
                share = _restore_running_average(op, share, part, before)
            elif part != 1.0:
                share = op.Mul(share, part)
            if i == 4 and unbiased:
                share = op.Mul(share, _bessel(op, node, share.dtype))
            newest[old] = op.Add(before, share)
    return [Buffer(old.name or "", old, new) for old, new in newest.items()]


def _name_statistics(op: OpBuilder, node: ir.Node) -> None:
    """Add and name the two statistics outputs of a node."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for out, old in zip(node.outputs[1:], node.inputs[3:5], strict=True):
        if not out.name and old is not None:
            out.name = op.names.fresh(f"{op.prefix}{node.op_type}.share")
            out.type, out.shape = old.type, old.shape


def _restore_running_average(
    op: OpBuilder, share: ir.Value, part: float, before: ir.Value
) -> ir.Value:
    """Redirect readers of a statistics output to the running average; return the contribution."""
    name = share.name
    share.name = op.names.fresh(f"{name}.share")
    added = op.Mul(share, part)
    total = op.Add(before, added)
    scaler = added.producer()
    total.name = name
    share.replace_all_uses_with(total, replace_graph_outputs=True)
    assert scaler is not None
    scaler.replace_input_with(0, share)
    op.graph.sort()
    return added


def _bessel(op: OpBuilder, node: ir.Node, dtype: ir.DataType | None) -> ir.Value:
    """Return n / (n - 1), with n the number of values per channel."""
    x = node.inputs[0]
    assert x is not None
    axes = [i for i in range(op.rank(x)) if i != 1]
    sizes = D.static_sizes([op.dims(x)[i] for i in axes])
    if sizes is not None:
        count = math.prod(sizes)
        return op.const(count / max(count - 1, 1), dtype)
    n = op.cast(op.count(x, axes), dtype)
    # The variance of a single value is zero, so the factor must be finite.
    rest = op.Sub(n, 1.0)
    return op.Div(n, op.Where(op.Greater(rest, 0.0), rest, 1.0))


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def _always_on(node: ir.Node) -> bool:
    flag = node.inputs[2] if len(node.inputs) > 2 else None
    array = S.constant_of(flag)
    return array is not None and bool(array.reshape(-1)[0])


def _restore_statistics(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    for i, out in enumerate(node.outputs[1:3], 3):
        statistic = node.inputs[i]
        if statistic is None:
            continue
        if out.is_graph_output():
            _put_identity(node, statistic, out)
        out.replace_all_uses_with(statistic)
    node.resize_outputs(1)


def _put_identity(node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """Replace the graph output ``y`` by ``x`` under the same name."""
    assert isinstance(node.graph, ir.Graph)
    identity = ir.Node("", "Identity", [x], num_outputs=1, version=node.version)
    new = identity.outputs[0]
    new.name, new.type, new.shape = y.name, y.type, y.shape
    identity.name = y.name
    y.name = f"{y.name}.replaced"
    node.graph.insert_before(node, identity)
    y.replace_all_uses_with(new, replace_graph_outputs=True)


def _bypass(node: ir.Node) -> None:
    x, y, graph = node.inputs[0], node.outputs[0], node.graph
    assert x is not None
    assert isinstance(graph, ir.Graph)
    if len(node.outputs) > 1 and node.outputs[1].uses():
        # The mask has readers: keep the node in inference mode.
        node.resize_inputs(2)
        return
    if y.is_graph_output():
        _put_identity(node, x, y)
    else:
        y.replace_all_uses_with(x)
    graph.remove(node, safe=True)


def sizes_above_one(model: ir.Model) -> tuple[str, ...]:
    """Return symbolic sizes whose product must exceed 1 in training, e.g. ``"batch*length"``.

    Raises:
        PrepareError: if a node has one value per channel in every batch.
    """
    wanted: dict[str, None] = {}
    for node in nodes(model.graph, "BatchNormalization"):
        mode, x = node.attributes.get("training_mode"), node.inputs[0]
        if mode is None or not mode.as_int() or x is None or x.shape is None:
            continue
        dims = [d for axis, d in enumerate(x.shape) if axis != 1]
        known = math.prod(d for d in dims if isinstance(d, int))
        names = [d.value or "" for d in dims if isinstance(d, ir.SymbolicDim)]
        if known == 1 and not names:
            raise PrepareError(
                f"BatchNormalization {node.name!r} has one value per channel: its input is "
                f"{list(x.shape)}, and in training mode it needs more\n"
                "hint: use a larger batch, or mode='as-is' to keep the running statistics"
            )
        if known == 1 and all(name.isidentifier() for name in names):
            wanted["*".join(sorted(names))] = None
    return tuple(wanted)
