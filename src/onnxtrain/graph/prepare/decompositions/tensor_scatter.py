"""TensorScatter: writing into a cache at a running position."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition


@decomposition("TensorScatter")
def tensor_scatter(op, past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """ScatterElements at the written positions."""
    where = written(op, past_cache, update, write_indices, axis, mode)
    return op.ScatterElements(past_cache, where, update, axis=axis)


def written(
    op: OpBuilder,
    cache: ir.Value,
    update: ir.Value,
    write_indices: ir.Value | None,
    axis: int,
    mode: str,
) -> ir.Value:
    """Give, in the shape of ``update``, the position along ``axis`` that each element goes to."""
    rank = op.rank(cache)
    axis %= rank
    line = op.reshape(op.iota(op.size(update, axis)), [-1] + [1] * (rank - 1 - axis))
    if write_indices is not None:
        line = op.Add(op.reshape(write_indices, [-1] + [1] * (rank - 1)), line)
    if mode == "circular":
        line = op.Mod(line, op.vector([op.size(cache, axis)]))
    return op.expand_like(line, update)
