"""Training-mode BatchNormalization in plain operators, for runtimes that have no kernel for it.

Group normalisation that an exporter wrote out, as the one operator it is.

Exporters write it as an InstanceNormalization of groups that are joined to one axis,
``Reshape, InstanceNormalization, Reshape``, with scale and shift of the channels behind it, or
without. InstanceNormalization itself is the one with a channel per group. As one operator its
gradient takes fewer passes, and images may be bfloat16, for which there is no kernel of the other.

Running averages of many small vectors, updated as one.

``new = old * kept + batch * part`` is three kernels for each mean and each variance of a net, and
each of them takes as long as its start. Vectors of one length are joined, averaged and split again:
six kernels for up to 32 of them. Only what is an output of the graph is joined, as what other nodes
read would have to wait for the last of the others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.expand.norms import can_normalize_groups
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.modes.train_eval import (
    BatchNormParameters,
    is_layer_output,
    mean_and_variance,
    normalize,
    prefers_fused_kernel,
)


def decompose_batch_norm(model: ir.Model, op: OpBuilder) -> int:
    """Put plain operators in the place of training-mode nodes; return how many there were."""
    graph = op.graph
    training = [n for n in nodes(graph, "BatchNormalization") if _number(n, "training_mode", 0)]
    for node in training:
        inside = op.before(node)
        for old, new in zip(node.outputs, _decomposed(inside, node), strict=False):
            new.type, new.shape = old.type, old.shape
            replace_value(old, new, list(old.uses()))
        graph.remove(node, safe=True)
    return len(training)


def _decomposed(op: OpBuilder, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the result and both new statistics."""
    x, scale, bias, old_mean, old_var = node.inputs
    assert x is not None
    assert scale is not None
    assert bias is not None
    kept, epsilon = _number(node, "momentum", 0.9), _number(node, "epsilon", 1e-5)
    mean, var = mean_and_variance(op, x)
    flat_mean, flat_var = op.Reshape(mean, [-1]), op.Reshape(var, [-1])
    in_one = op.target.prefers("fused-affine")
    if x.dtype == ir.DataType.BFLOAT16:
        y = _narrow_affine(op, x, (scale, bias, flat_mean, flat_var), epsilon)
    elif in_one and (prefers_fused_kernel(op, x) or is_layer_output(x)):
        y = normalize(op, x, BatchNormParameters(scale, bias, flat_mean, flat_var), epsilon)
    else:
        column = op.const([-1, *[1] * (op.rank(x) - 2)])
        spread = op.Sqrt(op.Add(var, epsilon))
        scaled = op.Mul(op.Div(op.Sub(x, mean), spread), op.Reshape(scale, column))
        y = op.Add(scaled, op.Reshape(bias, column))
    new = [
        _running_statistic(op, old, batch, kept)
        for old, batch in ((old_mean, flat_mean), (old_var, flat_var))
    ]
    return y, new[0], new[1]


def _narrow_affine(
    op: OpBuilder, x: ir.Value, numbers: tuple[ir.Value | None, ...], epsilon: float
) -> ir.Value:
    """Return ``x * gain + shift`` in bfloat16; the shift makes up for the rounded gain."""
    scale, bias, mean, var = (op.cast(v, ir.DataType.FLOAT) for v in numbers if v is not None)
    r = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    gain = op.cast(op.Mul(scale, r), x.dtype)
    shift = op.cast(op.Sub(bias, op.Mul(mean, op.cast(gain, mean.dtype))), x.dtype)
    last = list(range(1, op.rank(x) - 1))
    if last:
        gain, shift = op.Unsqueeze(gain, last), op.Unsqueeze(shift, last)
    return op.Add(op.Mul(x, gain), shift)


def _running_statistic(
    op: OpBuilder, old: ir.Value | None, batch: ir.Value, kept: float
) -> ir.Value:
    """Return the new statistic; an old one that is zero has no part in it."""
    part = op.Mul(batch, 1.0 - kept)
    return part if _is_zero(old) else op.Add(op.Mul(old, kept), part)


def _is_zero(x: ir.Value | None) -> bool:
    """Return whether a value is something times zero, as nodes are given that must not average."""
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return False
    factor = S.constant_of(product.inputs[1])
    return factor is not None and not factor.any()


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


def fuse_group_norm(model: ir.Model, op: OpBuilder) -> int:
    """Put a GroupNormalization in the place of what computes one; return how many there were."""
    schema = S.schema_of("GroupNormalization", op.opset)
    if schema is None or "stash_type" not in schema.attributes:
        return 0  # before it had that, scale and shift were those of groups
    return sum(_fold(op, node) for node in nodes(model.graph, "InstanceNormalization"))


def _fold(op: OpBuilder, norm: ir.Node) -> int:
    x, scale, bias = norm.inputs
    if x is None or scale is None or bias is None or norm.graph is not op.graph:
        return 0
    y, groups = norm.outputs[0], (S.dims_of(x) or (0, 0))[1]
    whole = _grouped_input(norm) if _is_all(scale, 1.0) and _is_all(bias, 0.0) else None
    if whole is not None:
        x, y = whole
        scale = bias = None
    if not isinstance(groups, int) or not can_normalize_groups(x, groups):
        return 0
    if scale is None or bias is None:
        scale, bias, y = _affine(op, x, y)
    if y.is_graph_output():  # callers hold on to outputs
        return 0
    replaced, last = _path(norm, y), y.producer()
    assert last is not None
    uses = list(y.uses())
    op.position = last
    epsilon = S.attributes_of(norm, op.opset)["epsilon"]
    folded = op.GroupNormalization(x, scale, bias, num_groups=groups, epsilon=epsilon)
    node = folded.producer()
    assert node is not None
    node.name = norm.name  # its scope says to which block it belongs
    node.metadata_props.update(norm.metadata_props)
    folded.type, folded.shape = y.type, y.shape
    replace_value(y, folded, uses)
    op.graph.remove(replaced, safe=True)
    return 1


def _path(norm: ir.Node, y: ir.Value) -> list[ir.Node]:
    """Return the nodes from a normalisation to a result, each the only reader of the last."""
    way = [norm]
    while y not in way[-1].outputs:
        (use,) = way[-1].outputs[0].uses()
        way.append(use.node)
    return way


def _grouped_input(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return what is normalised and the result in its shape, if groups are joined in between."""
    inner, out = norm.inputs[0], norm.outputs[0]
    before = None if inner is None else inner.producer()
    after = _only_reader(out)
    if (
        before is None
        or after is None
        or not is_op(before, "Reshape")
        or not is_op(after, "Reshape")
    ):
        return None
    x, y = before.inputs[0], after.outputs[0]
    inside = None if inner is None else S.dims_of(inner)
    if x is None or inside is None or len(inside) != 3 or not S.same_shape(x, y):
        return None
    outer = S.dims_of(x)
    # The batch stays in front: of a view with other rows the groups are others.
    return (x, y) if outer is not None and outer[0] == inside[0] is not None else None


def _affine(op: OpBuilder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return scale and shift of the channels that follow, 1 and 0 if none do, and their result."""
    channels, rank = (S.dims_of(x) or (0, 0))[1], S.rank_of(x)
    assert isinstance(channels, int)
    numbers: list[ir.Value] = []
    for kind, neutral in (("Mul", 1.0), ("Add", 0.0)):
        reader = _only_reader(y)
        other = _other(reader, y, kind)
        if reader is not None and other is not None and _per_channel(other, channels, rank):
            op.position = reader
            numbers.append(op.Reshape(other, [-1]))
            y = reader.outputs[0]
        else:
            numbers.append(op.const(np.full(channels, neutral), x.dtype))
    return numbers[0], numbers[1], y


def _other(node: ir.Node | None, x: ir.Value, kind: str) -> ir.Value | None:
    if node is None or not is_op(node, kind) or list(node.inputs).count(x) != 1:
        return None
    return node.inputs[1] if node.inputs[0] is x else node.inputs[0]


def _per_channel(v: ir.Value, channels: int, rank: int) -> bool:
    """Return whether a value broadcasts one number per channel."""
    dims = S.dims_of(v)
    if dims is None or not rank - 1 <= len(dims) <= rank:
        return False
    return list(dims[-(rank - 1) :]) == [channels, *[1] * (rank - 2)] and dims[0] in (1, channels)


def _is_all(x: ir.Value, number: float) -> bool:
    array = S.constant_of(x)
    return array is not None and bool((array == number).all())


def _only_reader(x: ir.Value) -> ir.Node | None:
    uses = list(x.uses())
    return uses[0].node if len(uses) == 1 and not x.is_graph_output() else None


class _RunningAverage(NamedTuple):
    """An output that is a sum of two scaled vectors."""

    new: ir.Value
    vectors: tuple[ir.Value, ir.Value]
    factors: tuple[float, float]


def fuse_running_stats(model: ir.Model, op: OpBuilder) -> int:
    """Join averages of vectors of one length and type; return how many were joined."""
    alike: dict[tuple[ir.DataType | None, int], list[_RunningAverage]] = defaultdict(list)
    for node in nodes(op.graph, "Add"):
        average = _find_running_average(node)
        if average is not None:
            sizes = D.static_sizes(S.dims_of(average.new) or (None,)) or [0]
            alike[average.new.dtype, sizes[0]].append(average)
    most, count = T.CUDA_GRAPH_CONCAT_INPUTS, 0
    for group in alike.values():
        for first in range(0, len(group), most):
            part = group[first : first + most]
            if len(part) >= T.FUSED_RUNNING_STATS:
                _fuse_averages(op.before(None), part)
                count += len(part)
    return count


def _find_running_average(node: ir.Node) -> _RunningAverage | None:
    """Return what a sum averages, if that is two vectors that it scales by numbers."""
    new = node.outputs[0]
    sizes = D.static_sizes(S.dims_of(new) or (None,))
    if not new.is_graph_output() or new.uses() or sizes is None or len(sizes) != 1:
        return None
    parts = [_scaled(x) for x in node.inputs]
    if any(p is None or S.dims_of(p[0]) != S.dims_of(new) for p in parts):
        return None
    (a, fa), (b, fb) = (p for p in parts if p is not None)
    return _RunningAverage(new, (a, b), (fa, fb))


def _scaled(x: ir.Value | None) -> tuple[ir.Value, float] | None:
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    vector, factor = product.inputs[0], S.constant_of(product.inputs[1])
    if vector is None or factor is None or factor.size != 1:
        return None
    return vector, float(factor.ravel()[0])


def _fuse_averages(op: OpBuilder, group: list[_RunningAverage]) -> None:
    sides = []
    for side in (0, 1):
        rows = op.Concat(*(a.vectors[side] for a in group), axis=0)
        factors = np.array([[a.factors[side]] for a in group])
        dtype = group[0].new.dtype
        if len(set(factors.ravel())) == 1:
            sides.append(op.Mul(rows, op.const(factors[0, 0], dtype)))
        else:
            table = op.Reshape(rows, [len(group), -1])
            sides.append(op.Reshape(op.Mul(table, op.const(factors, dtype)), [-1]))
    parts = op.Split(op.Add(*sides), axis=0, num_outputs=len(group), _outputs=len(group))
    for average, part in zip(group, parts, strict=True):
        part.type = average.new.type
        replace_value(average.new, part, [])
