"""A Scan that adds up numbers: its gradient is taken in the same loop.

Each step adds to the one number that is carried, so that the gradient of a step is a
multiple, by one factor, of what a factor of 1 would give. That is computed where the step is, and
multiplied when the factor is known: nothing of a step has to be kept or computed again. A loss over
a large vocabulary is the case it is made for: the scores of some rows are there once, and gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import accumulate
from onnxtrain.autodiff.subgraphs import own, shaped, sweep
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_nodes
from onnxtrain.graph.captured_values import captured

_SUMMED = "onnxtrain.summed"
Maybe = ir.Value | None


def mark_summed(node: ir.Node) -> None:
    """Say that a Scan carries one number, of shape [1], to which each step adds, and no more."""
    node.meta[_SUMMED] = True


def is_summed(node: ir.Node) -> bool:
    """Return whether a Scan does no more than add up."""
    return bool(node.meta.get(_SUMMED))


def summed_scan(
    op: OpBuilder, dy: ir.Value, node: ir.Node, wanted: Sequence[bool]
) -> tuple[Maybe, ...]:
    """``dx = dy * (gradient of the sum)``; the loop gives the sum and its gradient at once."""
    start, *scans = [x for x in node.inputs if x is not None]
    outer = captured(node)
    slices = [i for i, x in enumerate(scans) if wanted[1 + i] and S.is_float(x)]
    weights = [
        x for x, w in zip(outer, wanted[len(node.inputs) :], strict=True) if w and S.is_float(x)
    ]
    front = op.before(node)
    old = node.attributes["body"].as_graph()
    step = front.body([start, *weights, *old.inputs[1:]])
    total, *rest = step.graph.inputs
    sums, parts = rest[: len(weights)], rest[len(weights) :]
    (new,) = copy_nodes(step, old, dict(zip(old.inputs, [total, *parts], strict=True)))
    wrt = [*(parts[i] for i in slices), *weights]
    swept = own(step, sweep(step, [new], [step.const([1.0], new.dtype)], wrt), wrt)
    gradients, of_weights = swept[: len(slices)], swept[len(slices) :]
    added = [accumulate(step, a, b) for a, b in zip(sums, of_weights, strict=True)]
    step.graph.outputs.extend([new, *added, *gradients])
    results = front.Scan(
        *(start, *(front.zeros_like(x) for x in weights), *scans),
        body=step.graph,
        num_scan_inputs=len(scans),
        _outputs=1 + len(weights) + len(slices),
    )
    loss, *unscaled = results if isinstance(results, tuple) else (results,)
    loss.type, loss.shape = node.outputs[0].type, node.outputs[0].shape
    node.outputs[0].replace_all_uses_with(loss)
    scaled = [op.Mul(g, dy) for g in unscaled]
    by_weight = {x: shaped(g, x) for x, g in zip(weights, scaled, strict=False)}
    by_slice = dict(zip(slices, scaled[len(weights) :], strict=True))
    of_scans = [shaped(by_slice[i], x) if i in by_slice else None for i, x in enumerate(scans)]
    return None if not wanted[0] else dy, *of_scans, *(by_weight.get(x) for x in outer)
