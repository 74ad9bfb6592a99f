"""Rewrites of normalization layers.

- `decompose_batch_norm`: training-mode BatchNormalization becomes plain operators, for runtimes
  without a kernel for it.
- `fuse_group_norm` (CUDA): group normalization that an exporter wrote as InstanceNormalization
  becomes GroupNormalization.
- `fuse_running_stats` (CUDA): running statistics of equal length are updated together.
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

# Training-mode BatchNormalization.


def decompose_batch_norm(model: ir.Model, op: OpBuilder) -> int:
    """Replace training-mode BatchNormalization with plain operators; return how many.

    after:   y = (x - mean) / sqrt(var + epsilon) * scale + bias
             new_mean = old_mean * momentum + mean * (1 - momentum), and the same for var
    """
    graph = op.graph
    training = [n for n in nodes(graph, "BatchNormalization") if _attribute(n, "training_mode", 0)]
    for node in training:
        for old, new in zip(node.outputs, _decompose(op.before(node), node), strict=False):
            new.type, new.shape = old.type, old.shape
            replace_value(old, new, list(old.uses()))
        graph.remove(node, safe=True)
    return len(training)


def _decompose(op: OpBuilder, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the normalized value and both new running statistics."""
    x, scale, bias, old_mean, old_var = node.inputs
    assert x is not None
    assert scale is not None
    assert bias is not None
    momentum, epsilon = _attribute(node, "momentum", 0.9), _attribute(node, "epsilon", 1e-5)
    mean, var = mean_and_variance(op, x)
    flat_mean, flat_var = op.Reshape(mean, [-1]), op.Reshape(var, [-1])
    fused = op.target.prefers("fused-affine")
    if x.dtype == ir.DataType.BFLOAT16:
        y = _bfloat16_affine(op, x, (scale, bias, flat_mean, flat_var), epsilon)
    elif fused and (prefers_fused_kernel(op, x) or is_layer_output(x)):
        y = normalize(op, x, BatchNormParameters(scale, bias, flat_mean, flat_var), epsilon)
    else:
        column = op.const([-1, *[1] * (op.rank(x) - 2)])
        std = op.Sqrt(op.Add(var, epsilon))
        scaled = op.Mul(op.Div(op.Sub(x, mean), std), op.Reshape(scale, column))
        y = op.Add(scaled, op.Reshape(bias, column))
    new_mean = _running_statistic(op, old_mean, flat_mean, momentum)
    return y, new_mean, _running_statistic(op, old_var, flat_var, momentum)


def _bfloat16_affine(
    op: OpBuilder, x: ir.Value, parameters: tuple[ir.Value | None, ...], epsilon: float
) -> ir.Value:
    """Return `x * gain + shift` in bfloat16; the shift compensates for the rounding of the gain."""
    scale, bias, mean, var = (op.cast(v, ir.DataType.FLOAT) for v in parameters if v is not None)
    r = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    gain = op.cast(op.Mul(scale, r), x.dtype)
    shift = op.cast(op.Sub(bias, op.Mul(mean, op.cast(gain, mean.dtype))), x.dtype)
    spatial = list(range(1, op.rank(x) - 1))
    if spatial:
        gain, shift = op.Unsqueeze(gain, spatial), op.Unsqueeze(shift, spatial)
    return op.Add(op.Mul(x, gain), shift)


def _running_statistic(
    op: OpBuilder, old: ir.Value | None, batch: ir.Value, momentum: float
) -> ir.Value:
    part = op.Mul(batch, 1.0 - momentum)
    return part if _is_multiplied_by_zero(old) else op.Add(op.Mul(old, momentum), part)


def _is_multiplied_by_zero(x: ir.Value | None) -> bool:
    """Return whether a value is something times zero: old statistics that must not be averaged."""
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return False
    factor = S.constant_of(product.inputs[1])
    return factor is not None and not factor.any()


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


# Group normalization.


def fuse_group_norm(model: ir.Model, op: OpBuilder) -> int:
    """Replace InstanceNormalization of joined groups with GroupNormalization; return how many.

        before:  Reshape(InstanceNormalization(Reshape(x, [N, groups, -1]), 1, 0)) * scale + bias
        after:   GroupNormalization(x, scale, bias)

    Scale and bias per channel are optional. InstanceNormalization itself is the case with one group
    per channel. The gradient takes fewer passes, and images may be bfloat16, for which CUDA has no
    InstanceNormalization kernel.
    """
    schema = S.schema_of("GroupNormalization", op.opset)
    if schema is None or "stash_type" not in schema.attributes:
        return 0  # before opset 21, scale and bias were per group
    return sum(_fuse_norm(op, node) for node in nodes(model.graph, "InstanceNormalization"))


def _fuse_norm(op: OpBuilder, norm: ir.Node) -> int:
    x, scale, bias = norm.inputs
    if x is None or scale is None or bias is None or norm.graph is not op.graph:
        return 0
    y, groups = norm.outputs[0], (S.dims_of(x) or (0, 0))[1]
    has_affine = not (_is_filled_with(scale, 1.0) and _is_filled_with(bias, 0.0))
    around = None if has_affine else _reshapes_around(norm)
    if around is not None:
        x, y = around
        scale = bias = None
    if not isinstance(groups, int) or not can_normalize_groups(x, groups):
        return 0
    if scale is None or bias is None:
        scale, bias, y = _following_affine(op, x, y)
    if y.is_graph_output():  # callers hold on to output values
        return 0
    replaced, last = _chain(norm, y), y.producer()
    assert last is not None
    uses = list(y.uses())
    op.position = last
    epsilon = S.attributes_of(norm, op.opset)["epsilon"]
    fused = op.GroupNormalization(x, scale, bias, num_groups=groups, epsilon=epsilon)
    node = fused.producer()
    assert node is not None
    node.name = norm.name  # recomputation reads the block from the scope in the name
    node.metadata_props.update(norm.metadata_props)
    fused.type, fused.shape = y.type, y.shape
    replace_value(y, fused, uses)
    op.graph.remove(replaced, safe=True)
    return 1


def _chain(norm: ir.Node, y: ir.Value) -> list[ir.Node]:
    """Return the nodes from a norm to a value, each the only reader of the one before."""
    chain = [norm]
    while y not in chain[-1].outputs:
        (use,) = chain[-1].outputs[0].uses()
        chain.append(use.node)
    return chain


def _reshapes_around(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the input and the result if reshapes around a norm join groups and undo it."""
    inner = norm.inputs[0]
    before, after = None if inner is None else inner.producer(), _only_reader(norm.outputs[0])
    if before is None or after is None:
        return None
    if not is_op(before, "Reshape") or not is_op(after, "Reshape"):
        return None
    x, y = before.inputs[0], after.outputs[0]
    inner_dims = None if inner is None else S.dims_of(inner)
    if x is None or inner_dims is None or len(inner_dims) != 3 or not S.same_shape(x, y):
        return None
    dims = S.dims_of(x)
    # A reshape that changes the batch axis joins channels of different images.
    return (x, y) if dims is not None and dims[0] == inner_dims[0] is not None else None


def _following_affine(
    op: OpBuilder, x: ir.Value, y: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return scale and bias of the channels that follow `y`, or 1 and 0, and their result."""
    channels, rank = (S.dims_of(x) or (0, 0))[1], S.rank_of(x)
    assert isinstance(channels, int)
    parameters: list[ir.Value] = []
    for op_type, neutral in (("Mul", 1.0), ("Add", 0.0)):
        reader = _only_reader(y)
        other = _other_operand(reader, y, op_type)
        if reader is not None and other is not None and _is_per_channel(other, channels, rank):
            op.position = reader
            parameters.append(op.Reshape(other, [-1]))
            y = reader.outputs[0]
        else:
            parameters.append(op.const(np.full(channels, neutral), x.dtype))
    return parameters[0], parameters[1], y


def _other_operand(node: ir.Node | None, x: ir.Value, op_type: str) -> ir.Value | None:
    if node is None or not is_op(node, op_type) or list(node.inputs).count(x) != 1:
        return None
    return node.inputs[1] if node.inputs[0] is x else node.inputs[0]


def _is_per_channel(v: ir.Value, channels: int, rank: int) -> bool:
    """Return whether a value broadcasts one element per channel."""
    dims = S.dims_of(v)
    if dims is None or not rank - 1 <= len(dims) <= rank:
        return False
    return list(dims[-(rank - 1) :]) == [channels, *[1] * (rank - 2)] and dims[0] in (1, channels)


def _is_filled_with(x: ir.Value, number: float) -> bool:
    array = S.constant_of(x)
    return array is not None and bool((array == number).all())


def _only_reader(x: ir.Value) -> ir.Node | None:
    uses = list(x.uses())
    return uses[0].node if len(uses) == 1 and not x.is_graph_output() else None


# Running statistics.


class _RunningAverage(NamedTuple):
    """A graph output that is `vectors[0] * factors[0] + vectors[1] * factors[1]`."""

    output: ir.Value
    vectors: tuple[ir.Value, ir.Value]
    factors: tuple[float, float]


def fuse_running_stats(model: ir.Model, op: OpBuilder) -> int:
    """Update running statistics of one length and type together; return how many.

        before:  for each: old * momentum + batch * (1 - momentum)
        after:   Split(Concat(olds) * momentum + Concat(batches) * (1 - momentum))

    Each statistic takes three kernels, each as long as its launch; together up to 32 of them take
    six. Only graph outputs are fused: other readers would have to wait for all of them.
    """
    groups: dict[tuple[ir.DataType | None, int], list[_RunningAverage]] = defaultdict(list)
    for node in nodes(op.graph, "Add"):
        average = _find_running_average(node)
        if average is not None:
            sizes = D.static_sizes(S.dims_of(average.output) or (None,)) or [0]
            groups[average.output.dtype, sizes[0]].append(average)
    count = 0
    for group in groups.values():
        for first in range(0, len(group), T.CUDA_GRAPH_CONCAT_INPUTS):
            part = group[first : first + T.CUDA_GRAPH_CONCAT_INPUTS]
            if len(part) >= T.FUSED_RUNNING_STATS:
                _fuse_averages(op.before(None), part)
                count += len(part)
    return count


def _find_running_average(node: ir.Node) -> _RunningAverage | None:
    """Return what a sum averages, if it is a graph output of two vectors scaled by constants."""
    y = node.outputs[0]
    dims = D.static_sizes(S.dims_of(y) or (None,))
    if not y.is_graph_output() or y.uses() or dims is None or len(dims) != 1:
        return None
    terms = [_scaled_vector(x) for x in node.inputs]
    if any(t is None or S.dims_of(t[0]) != S.dims_of(y) for t in terms):
        return None
    (a, factor_a), (b, factor_b) = (t for t in terms if t is not None)
    return _RunningAverage(y, (a, b), (factor_a, factor_b))


def _scaled_vector(x: ir.Value | None) -> tuple[ir.Value, float] | None:
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    vector, factor = product.inputs[0], S.constant_of(product.inputs[1])
    if vector is None or factor is None or factor.size != 1:
        return None
    return vector, float(factor.ravel()[0])


def _fuse_averages(op: OpBuilder, group: list[_RunningAverage]) -> None:
    terms = []
    for side in (0, 1):
        rows = op.Concat(*(a.vectors[side] for a in group), axis=0)
        factors = np.array([[a.factors[side]] for a in group])
        dtype = group[0].output.dtype
        if len(set(factors.ravel())) == 1:
            terms.append(op.Mul(rows, op.const(factors[0, 0], dtype)))
        else:
            table = op.Reshape(rows, [len(group), -1])
            terms.append(op.Reshape(op.Mul(table, op.const(factors, dtype)), [-1]))
    parts = op.Split(op.Add(*terms), axis=0, num_outputs=len(group), _outputs=len(group))
    for average, part in zip(group, parts, strict=True):
        part.type = average.output.type
        replace_value(average.output, part, [])
