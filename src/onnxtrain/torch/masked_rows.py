"""Rows of attention that see no key: zeros, as torch has it.

torch's exporter writes a mask of booleans as zeros and lowest numbers, so that such a row is the
mean of all values, and puts a guard against NaN behind the softmax that never sees one. With minus
infinities it does, and gives zeros. Batches that are filled up on the left have such rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nan_guard import nan_guard
from onnxtrain.graph.nodes import is_op, nodes


def close_masked_rows(model: ir.Model) -> int:
    """Write minus infinity for the lowest number in masks of guarded softmaxes; return how often.

    Only where nothing else reads a mask.
    """
    op, closed = OpBuilder(model.graph, "mask/"), 0
    for node in nodes(model.graph, "Where", subgraphs=True):
        mask = node.outputs[0]
        if mask.is_graph_output() or not all(_is_guarded(use.node) for use in mask.uses()):
            continue
        value = node.inputs[2] if mask.uses() else None
        low = None if value is None else ir.convenience.get_const_tensor(value)
        if low is None or low.size != 1 or not low.dtype.is_floating_point():
            continue
        if float(low.numpy().item()) == float(low.dtype.min):
            node.replace_input_with(2, op.const(-np.inf, low.dtype))
            closed += 1
    return closed


def _is_guarded(add: ir.Node) -> bool:
    """Return whether a sum is what a softmax reads whose NaN become zeros."""
    readers = [use.node for use in add.outputs[0].uses()]
    if not is_op(add, "Add") or len(readers) != 1 or not is_op(readers[0], "Softmax"):
        return False
    return nan_guard(readers[0].outputs[0]) is not None


__all__ = ["close_masked_rows"]
