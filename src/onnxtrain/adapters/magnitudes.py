"""DoRA: a trained length for each output, while the branch turns the weights.

With ``V = W + s A B`` column by column, ``y = x V * m / |V|``. The length of V counts as a constant
when gradients are computed, as its authors propose. It needs no weights as floats:

``|V|^2 = |W|^2 + 2 s sum((A^T W) * B) + s^2 sum(B * (A^T A B))``,

where ``A^T W`` is the frozen layer itself, applied to the rows of ``A^T``.

With dropout, only what turns or stretches the weights reads the activations ``d`` that are left:
``y = x W + (m / |V| - 1) * d W + m / |V| * s d A B``, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.modules.frozen_weights import frozen_weight
from onnxtrain.adapters.modules.layers import CONV, Layer
from onnxtrain.adapters.modules.units import Unit
from onnxtrain.adapters.pieces import Piece
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import STOP, is_op

_BIAS = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5}  # the place of the bias among the inputs


def lengths(unit: Unit) -> np.ndarray:
    """Return the length of the frozen weights of each output."""
    parts = []
    for site in unit.sites:
        weight = frozen_weight(site.layer).astype(np.float64)
        if site.layer.kind == CONV:
            parts.append(np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)))))
        elif site.column == sum(p.size for p in parts):
            columns = weight[:, site.start : site.start + site.width]
            parts.append(np.sqrt((columns**2).sum(axis=0)))
    return np.concatenate(parts)


def with_lengths(
    op: OpBuilder, layer: Layer, pieces: Sequence[Piece], branch: ir.Value, x: ir.Value
) -> ir.Value:
    """Return what takes the place of a layer's output; its bias is added behind, in place.

    Args:
        op: writes nodes behind the layer.
        layer: the frozen layer.
        pieces: the adapters in its output.
        branch: what they add.
        x: the activations that the branch reads.
    """
    if x is not layer.x:
        factors = _factors(op, layer, pieces)
        stretched = op.Mul(_applied(op, layer, x), op.Sub(factors, 1.0))
        return op.Add(layer.y, op.Add(stretched, op.Mul(branch, factors)))
    bias = _take_bias(layer.node)
    total = op.Mul(op.Add(layer.y, branch), _factors(op, layer, pieces))
    return total if bias is None else op.Add(total, _per_channel(op, layer, bias))


def _take_bias(node: ir.Node) -> ir.Value | None:
    place = _BIAS.get(node.op_type, 0)
    bias = node.inputs[place] if place and len(node.inputs) > place else None
    if bias is not None:
        node.replace_input_with(place, None)
    return bias


def _per_channel(op: OpBuilder, layer: Layer, x: ir.Value) -> ir.Value:
    """Return a vector over the outputs in the shape that it is broadcast in."""
    if layer.kind != CONV:
        beta = layer.node.attributes.get_float("beta", 1.0) if is_op(layer.node, "Gemm") else 1.0
        return x if beta == 1.0 else op.Mul(x, beta)
    return op.Reshape(x, [-1, *[1] * len(layer.kernel)])


def _factors(op: OpBuilder, layer: Layer, pieces: Sequence[Piece]) -> ir.Value:
    """Return what each output is multiplied by; outputs without an adapter stay as they are."""
    parts, at = [], 0
    for piece in sorted(pieces, key=lambda p: p.start):
        if piece.start > at:
            parts.append(op.const(np.ones(piece.start - at), layer.dtype))
        parts.append(_factor(op, layer, piece))
        at = piece.start + piece.width
    if at < layer.outputs:
        parts.append(op.const(np.ones(layer.outputs - at), layer.dtype))
    whole = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
    return _per_channel(op, layer, whole) if layer.kind == CONV else whole


def _factor(op: OpBuilder, layer: Layer, piece: Piece) -> ir.Value:
    """Return ``m / |V|`` of a piece."""
    assert piece.magnitude is not None
    assert piece.squared_length is not None
    rows, images = _images(op, layer, piece)
    b = op.Transpose(op.Reshape(piece.b, [-1, piece.rank])) if layer.kind == CONV else piece.b
    own = piece.column, piece.column + piece.width
    magnitude, fixed = piece.magnitude, piece.squared_length
    if piece.width != piece.outputs:
        b = op.Slice(b, [own[0]], [own[1]], [1])
        magnitude, fixed = (op.Slice(v, [own[0]], [own[1]], [0]) for v in (magnitude, fixed))
    gram = op.MatMul(rows, op.Transpose(rows, perm=[1, 0]))
    mixed = op.ReduceSum(op.Mul(images, b), [0], keepdims=0)
    square = op.ReduceSum(op.Mul(b, op.MatMul(gram, b)), [0], keepdims=0)
    s = piece.scaling
    length = op.Sqrt(op.Add(fixed, op.Add(op.Mul(mixed, 2 * s), op.Mul(square, s * s))))
    return op.Div(magnitude, _constant(op, length))


def _images(op: OpBuilder, layer: Layer, piece: Piece) -> tuple[ir.Value, ir.Value]:
    """Return ``A^T`` and ``A^T W`` on the columns of a piece."""
    if layer.kind == CONV:
        rows = op.Reshape(piece.a, [piece.rank, -1])
        kernel = op.Reshape(layer.node.inputs[1], [layer.outputs, -1])
        return rows, op.MatMul(rows, op.Transpose(kernel, perm=[1, 0]))
    rows = op.Transpose(piece.a, perm=[1, 0])
    images = _applied(op, layer, rows, leave="accuracy_level")
    if images.shape is None:
        images.shape = ir.Shape([piece.rank, layer.outputs])
    if piece.width != layer.outputs:
        images = op.Slice(images, [piece.start], [piece.start + piece.width], [1])
    return rows, images


def _applied(op: OpBuilder, layer: Layer, x: ir.Value, *, leave: str = "") -> ir.Value:
    """Return what the layer makes of other activations, without its bias."""
    node = layer.node
    attributes = [a for n, a in node.attributes.items() if n not in (leave, "beta")]
    keep = list(node.inputs)[: _BIAS.get(node.op_type, len(node.inputs))]
    copy = ir.Node(node.domain, node.op_type, [x, *keep[1:]], attributes, version=node.version)
    y = op.append(copy)
    if y.type is None:
        y.type = ir.TensorType(layer.dtype)
    return y


def _constant(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the same value for which no gradient is computed."""
    y = op.Identity(x)
    node = y.producer()
    assert node is not None
    node.name = op.names.fresh(f"{y.name}.{STOP}")
    return y


__all__ = ["lengths", "with_lengths"]
