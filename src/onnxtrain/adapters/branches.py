"""Low-rank branches in the graph: ``y + scaling * (x A) B`` beside a frozen layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.magnitudes import with_lengths
from onnxtrain.adapters.modules.layers import CONV, EMBEDDING, LINEAR, Layer
from onnxtrain.adapters.modules.operand import operand
from onnxtrain.adapters.pieces import Piece
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value

_WINDOW = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


class Branches:
    """Puts branches into a graph; what several layers have in common is computed once."""

    def __init__(self, graph: ir.Graph, dropout: float) -> None:
        self.op = OpBuilder(graph, "lora/")
        self.dropout = dropout
        nodes = list(graph)
        self._behind = dict(zip(nodes, [*nodes[1:], None], strict=True))
        self._dropped: dict[ir.Value, ir.Value] = {}
        self._narrow: dict[tuple[ir.Value, tuple[ir.Value, ...]], ir.Value] = {}

    def add(self, layer: Layer, pieces: Sequence[Piece]) -> ir.Value:
        """Put the branch of a layer into the graph; return the sum that takes its place."""
        op = self.op.before(self._behind[layer.node])
        y = layer.y
        _declare(layer)
        uses = [(u.node, u.idx) for u in y.uses()]
        branch = self.branch(op, layer, pieces)
        if pieces[0].magnitude is None:
            total = op.Add(y, branch)
        else:
            total = with_lengths(op, layer, pieces, branch, self._input(op, layer.x))
        total.type, total.shape = y.type, y.shape
        replace_value(y, total, uses)
        return total

    def branch(self, op: OpBuilder, layer: Layer, pieces: Sequence[Piece]) -> ir.Value:
        """Return what is added to the output of a layer."""
        if layer.kind == EMBEDDING:
            (piece,) = pieces
            rows = _scaled(op, op.Gather(piece.a, layer.x, axis=0), pieces)
            return op.MatMul(rows, piece.b)
        if layer.kind == CONV:
            (piece,) = pieces
            window = {
                n: layer.node.attributes[n].value for n in _WINDOW if n in layer.node.attributes
            }
            narrow = op.Conv(self._input(op, layer.x), piece.a, **window)
            return op.Conv(_scaled(op, narrow, pieces), piece.b, group=layer.groups)
        return op.MatMul(self._rows(op, layer.x, pieces), _wide(op, pieces, layer.outputs))

    def _rows(self, op: OpBuilder, x: ir.Value, pieces: Sequence[Piece]) -> ir.Value:
        """Return ``x A`` of all pieces side by side, scaled."""
        key = x, tuple(p.a for p in pieces)
        if key not in self._narrow:
            matrices = [p.a for p in pieces]
            a = matrices[0] if len(matrices) == 1 else op.Concat(*matrices, axis=1)
            self._narrow[key] = _scaled(op, op.MatMul(self._input(op, x), a), pieces)
        return self._narrow[key]

    def _input(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return the activations that branches read: some are dropped in training, if asked."""
        if not self.dropout:
            return x
        if x not in self._dropped:
            ratio = op.const(np.float32(self.dropout))
            self._dropped[x] = op.Dropout(x, ratio)
        return self._dropped[x]


def _declare(layer: Layer) -> None:
    """Give the ends of a layer their types where the file does not, in place."""
    for value in (layer.y, *([] if layer.kind == EMBEDDING else [layer.x])):
        if value.type is None:
            value.type = ir.TensorType(layer.dtype)
    weight = layer.node.inputs[1]
    stored = operand(weight) if layer.kind == LINEAR and not layer.node.domain else None
    if stored is not None and stored.value.type is None:
        stored.value.type = ir.TensorType(layer.dtype)
        stored.value.shape = ir.Shape(stored.shape)


def _scaled(op: OpBuilder, narrow: ir.Value, pieces: Sequence[Piece]) -> ir.Value:
    """Return the narrow activations times alpha / rank: there are few of them."""
    if all(p.scaling == 1.0 for p in pieces):
        return narrow
    if all(p.scaling == pieces[0].scaling for p in pieces):
        return op.Mul(narrow, pieces[0].scaling)
    columns = np.concatenate([np.full(p.rank, p.scaling, np.float32) for p in pieces])
    return op.Mul(narrow, op.const(columns, narrow.dtype))


def _wide(op: OpBuilder, pieces: Sequence[Piece], outputs: int) -> ir.Value:
    """Return the second factors one below the other, each in its own columns of the output."""
    rows = []
    for p in pieces:
        b = p.b
        if p.width != p.outputs:
            b = op.Slice(b, [p.column], [p.column + p.width], [1])
        if p.width != outputs:
            b = op.Pad(b, [0, p.start, 0, outputs - p.start - p.width])
        rows.append(b)
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


__all__ = ["Branches"]
