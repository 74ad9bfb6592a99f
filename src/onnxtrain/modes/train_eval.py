"""Training mode and evaluation mode of a graph.

A contract about BatchNormalization in training mode: when its outputs are the batch's own.

The operator puts out ``momentum * old + (1 - momentum) * batch`` for mean and variance. With
momentum 0 that is the mean and the (population's) variance of the batch, whatever the old values.

``running_statistics`` makes nodes so, on targets that prefer it, and averages behind the node; the
gradient rule reads the batch's statistics from such a node, and does not compute them again.

Where a runtime has no such kernel, :func:`mean_and_variance` computes both.

BatchNormalization in training mode needs more than one value per channel.

Of a single value, the mean is the value and the variance 0: whatever comes in, the bias comes out,
and the running statistics become those of one sample.
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
_DEFAULT = 0.9  # the standard's
_LAYOUT_OPS = (
    *("Cast", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze"),
)


def momentum_of(node: ir.Node) -> float:
    """Return which part of the old statistics a BatchNormalization keeps."""
    momentum = node.attributes.get("momentum")
    return _DEFAULT if momentum is None else momentum.as_float()


def request_batch_statistics(node: ir.Node) -> None:
    """Make a BatchNormalization put out the statistics of the batch, and nothing of the old."""
    node.attributes["momentum"] = ir.AttrFloat32("momentum", _BATCH_ONLY)


def has_batch_statistics(node: ir.Node) -> bool:
    """Return whether outputs 1 and 2 of a training node are the batch's mean and variance."""
    return momentum_of(node) == _BATCH_ONLY


def prefers_fused_kernel(op: OpBuilder, x: ir.Value) -> bool:
    """Return whether kernels of normalisation are faster than plain passes, by the size of images.

    On CPUs they always are.
    """
    if x.dtype != ir.DataType.FLOAT:
        return False
    return not op.target.gpu or _large(op, x)


def _large(op: OpBuilder, x: ir.Value) -> bool:
    sizes = D.static_sizes(op.dims(x)[2:])
    return bool(sizes) and math.prod(sizes or ()) >= T.NORM_KERNEL_POSITIONS


def is_layer_output(x: ir.Value) -> bool:
    """Return whether a layer with weights made a value, in 32 bits.

    Means of such values are seldom larger than deviations by orders of magnitude, so that products
    of what is not centered keep their digits; inputs of a model may be years, or prices.
    """
    layer = x.producer()
    if layer is None or x.dtype != ir.DataType.FLOAT:
        return False
    return is_op(layer, "Conv", "ConvTranspose", "Gemm", "MatMul")


def layer_reads_graph_input(x: ir.Value) -> bool:
    """Return whether the layer that made a value reads an input of the model, and pads nothing.

    Its weight's gradient multiplies the mean of that input by the sum of a gradient, which is zero
    but for rounding errors. With padding there is no such mean.
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
    """Numbers of each channel, as BatchNormalization takes them."""

    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value


def normalize(op: OpBuilder, x: ir.Value, given: BatchNormParameters, epsilon: float) -> ir.Value:
    """Return ``scale * (x - mean) / sqrt(variance + epsilon) + bias``.

    By the operator, or as ``x * slope + (bias - mean * slope)`` where plain passes are faster.
    """
    if prefers_fused_kernel(op, x):
        return op.BatchNormalization(x, *given, epsilon=epsilon)
    slope = op.Div(given.scale, op.Sqrt(op.Add(given.variance, epsilon)))
    level = op.Sub(given.bias, op.Mul(given.mean, slope))
    column = [-1, *[1] * (op.rank(x) - 2)]
    return op.Add(op.Mul(x, op.Reshape(slope, column)), op.Reshape(level, column))


def mean_and_variance(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return mean and (the population's) variance of each channel, as ``[C, 1, ...]``.

    Of bfloat16 images they are float32.
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

    LayerNormalization computes mean and ``1 / deviation`` of an image in one pass; what it puts out
    besides is not used. The batch's variance is the mean of ``var + (mean - mean of means)^2``.
    """
    images = op.Reshape(x, [0, 0, positions])
    one = op.const(np.ones(positions), x.dtype)
    y, means, r = op.LayerNormalization(images, one, axis=2, epsilon=0.0, _outputs=3)
    # onnxruntime keeps what nothing reads until the run ends: as much again as all activations.
    unread = op.Slice(y, [0, 0, 0], [1, 1, 1], [0, 1, 2])
    means = op.Where(op.const([False]), op.cast(unread, means.dtype), means)
    mean = op.ReduceMean(means, [0], keepdims=1)
    away = op.Sub(means, mean)
    # Of an image of equal values r is infinite, and this 0.
    spread = op.Reciprocal(op.Mul(r, r))
    return mean, op.ReduceMean(op.Add(spread, op.Mul(away, away)), [0], keepdims=1)


_MODES_SINCE = 14  # opset from which on BatchNormalization has a mode


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A running statistic: the value read, and the value that replaces it after the step."""

    name: str
    old: ir.Value
    new: ir.Value


def to_training(model: ir.Model, *, trainable: set[str]) -> list[str]:
    """Put BatchNormalization with a trainable scale into training mode, and Dropout on, in place.

    Args:
        model: a prepared model.
        trainable: names of the parameters that will be trained.

    Returns:
        A line for each kind of change.
    """
    changed, inside = {"BatchNormalization": 0, "Dropout": 0}, 0
    for node in nodes(model.graph, *changed, subgraphs=True):
        if node.op_type == "BatchNormalization":
            scale = node.inputs[1]
            if scale is None or scale.name not in trainable or _int(node, "training_mode"):
                continue
            if node.graph is not model.graph:
                inside += 1  # new statistics could not leave the body
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
    """Put BatchNormalization on its running statistics and drop Dropout, in place.

    The model need not be prepared: before opset 14, more than one output stood for training mode.
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
    """Let statistics that share an initializer with something else have their own, in place.

    Exporters that store equal tensors once make a fresh running variance and a fresh scale the same
    initializer, since both are ones.

    Returns:
        A line if something was changed.
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

    ONNX averages the biased variance; with ``unbiased`` the batch's share is scaled by n / (n - 1),
    as torch does. Statistics that several nodes share are updated by each in turn.

    onnxruntime writes the new statistics over the old ones, wherever these come from. So the nodes
    are given zeros of their own, and what they put out is the batch's share alone: on CPU all of
    the batch's statistics, which the gradient needs as well, elsewhere what they add.
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
            # From the last share if there is one: equal expressions might become one value.
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
    """Add the outputs for new statistics to a node: there are both or none."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for out, old in zip(node.outputs[1:], node.inputs[3:5], strict=True):
        if not out.name and old is not None:
            out.name = op.names.fresh(f"{op.prefix}{node.op_type}.share")
            out.type, out.shape = old.type, old.shape


def _restore_running_average(
    op: OpBuilder, share: ir.Value, part: float, before: ir.Value
) -> ir.Value:
    """Let readers of a new statistic read its sum with the old one; return the batch's part."""
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
    # A single value has no spread: the share is zero then, and the factor must not be infinite.
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
    """Make ``x`` the graph output that ``y`` is, under the name that it has."""
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
        # Somebody reads the mask: leave the node, switched off.
        node.resize_inputs(2)
        return
    if y.is_graph_output():
        _put_identity(node, x, y)
    else:
        y.replace_all_uses_with(x)
    graph.remove(node, safe=True)


def sizes_above_one(model: ir.Model) -> tuple[str, ...]:
    """Return sizes whose product must be above 1 in training: ``"batch"``, ``"batch*length"``.

    Raises:
        PrepareError: naming a node that has one value per channel in every batch.
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
                "hint: a larger batch, or mode='as-is', which takes the running statistics"
            )
        if known == 1 and all(name.isidentifier() for name in names):
            wanted["*".join(sorted(names))] = None
    return tuple(wanted)
