"""Slopes of GELU for bfloat16 by a table: a function of 16 bits has few values.

The gradient of GELU takes ten passes or more over the widest activations of a transformer, and each
rounds to 8 bits. Scaled by 2048 every bfloat16 of at least 1/16 is a whole number, so that a table
of these has its slope, rounded once; for smaller ones the middle of 1/2048 is nearer to it than one
rounding. Beyond 7.97 slopes are 0 or 1. So six passes are left: scale, two bounds, whole numbers,
the table and the product with the gradient. Negative numbers count from the end of the table.

Whole numbers have no gradient, so this is for graphs that nobody differentiates again.
"""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.modes.slope_marks import GELU_TANH, GELU_TWICE, slope_kind
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D

_STEPS = 2048
_BOUND = 255 * 64
"""The last step, a bfloat16; 7.97 is where slopes are 0 or 1 in 16 bits."""
_EXACT = _STEPS // 16
"""From this step on, each bfloat16 is a whole number of steps."""


def slopes_by_table(model: ir.Model, op: OpBuilder) -> int:
    """Look marked slopes of large tensors up, in place; return how many."""
    tables: dict[str, ir.Value] = {}
    return sum(_look_up(op, node, tables) for node in nodes(op.graph, "Add"))


def _look_up(op: OpBuilder, node: ir.Node, tables: dict[str, ir.Value]) -> int:
    slope = node.outputs[0]
    kind = slope_kind(slope)
    x = _argument(node) if kind in _FUNCTIONS else None
    if kind is None or x is None or slope.is_graph_output() or not _is_gelu(x, kind):
        return 0
    sizes = D.numbers(S.dims_of(slope) or (None,))
    if sizes is None or math.prod(sizes) < T.WIDE_PASS_ELEMENTS or not S.same_shape(x, slope):
        return 0
    uses = list(slope.uses())
    op.position = node
    if kind not in tables:
        tables[kind] = op.const(_table(kind), ir.DataType.BFLOAT16)
    steps = op.Min(op.Mul(x, float(_STEPS)), float(_BOUND))
    places = op.Cast(op.Max(steps, -float(_BOUND)), to=ir.DataType.INT32)
    replace_value(slope, op.Gather(tables[kind], places, axis=0), uses)
    return 1


def _argument(node: ir.Node) -> ir.Value | None:
    """Return what the slope is one at: ``x`` of ``Sigmoid(x ...)`` or of ``Erf(x ...) + 1``."""
    below = node.inputs[0]
    made = None if below is None else below.producer()
    if made is not None and is_op(made, "Add"):
        below = made.inputs[0]
        made = None if below is None else below.producer()
    if made is None or not is_op(made, "Sigmoid", "Erf"):
        return None
    inner = made.inputs[0]
    product = None if inner is None else inner.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    x = product.inputs[0]
    return x if x is not None and x.dtype == ir.DataType.BFLOAT16 else None


def _is_gelu(x: ir.Value, kind: str) -> bool:
    """Return whether a Gelu of that kind reads a value."""
    wanted = "tanh" if kind == GELU_TANH else "none"
    for use in x.uses():
        if is_op(use.node, "Gelu"):
            given = use.node.attributes.get("approximate")
            if (given.as_string() if given is not None else "none") == wanted:
                return True
    return False


@functools.cache
def _table(kind: str) -> np.ndarray:
    """Return slopes at whole steps, those below zero from the end."""
    step = np.arange(-_BOUND, _BOUND + 1)
    inside = (abs(step) < _EXACT) & (step != 0)
    x = (step + np.where(inside, np.sign(step) * 0.5, 0.0)) / _STEPS
    slopes = _FUNCTIONS[kind](x)
    return np.concatenate([slopes[_BOUND:], slopes[:_BOUND]]).astype(ml_dtypes.bfloat16)


def _tanh_slope(x: np.ndarray) -> np.ndarray:
    c, k = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
    below = 1.0 / (1.0 + np.exp(-c * (x + k * x**3)))
    return below + x * below * (1.0 - below) * c * (1.0 + 3.0 * k * x**2)


def _erf_slope_twice(x: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(v) for v in x * math.sqrt(0.5)])
    return 1.0 + erf + 2.0 * x * np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)


_FUNCTIONS = {GELU_TANH: _tanh_slope, GELU_TWICE: _erf_slope_twice}

__all__ = ["slopes_by_table"]
