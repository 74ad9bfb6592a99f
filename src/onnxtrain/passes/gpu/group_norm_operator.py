"""Group normalisation that an exporter wrote out, as the one operator it is.

Exporters write it as an InstanceNormalization of groups that are joined to one axis,
``Reshape, InstanceNormalization, Reshape``, with scale and shift of the channels behind it, or
without. InstanceNormalization itself is the one with a channel per group. As one operator its
gradient takes fewer passes, and images may be bfloat16, for which there is no kernel of the other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.composed.normalised_groups import can_be_normalised
from onnxtrain.graph.nodes import is_op, nodes


def group_norm_operator(model: ir.Model, op: OpBuilder) -> int:
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
    whole = _joined(norm) if _is_all(scale, 1.0) and _is_all(bias, 0.0) else None
    if whole is not None:
        x, y = whole
        scale = bias = None
    if not isinstance(groups, int) or not can_be_normalised(x, groups):
        return 0
    if scale is None or bias is None:
        scale, bias, y = _affine(op, x, y)
    if y.is_graph_output():  # callers hold on to outputs
        return 0
    replaced, last = _way(norm, y), y.producer()
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


def _way(norm: ir.Node, y: ir.Value) -> list[ir.Node]:
    """Return the nodes from a normalisation to a result, each the only reader of the last."""
    way = [norm]
    while y not in way[-1].outputs:
        (use,) = way[-1].outputs[0].uses()
        way.append(use.node)
    return way


def _joined(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
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


__all__ = ["group_norm_operator"]
