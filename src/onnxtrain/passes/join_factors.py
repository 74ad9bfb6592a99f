"""Numbers that gradients are multiplied by one after the other become one number.

``-(u * 0.5) / s * (1 / n) * 2 * x = u * (-1 / n) / s * x``. The gradient of a root-mean-square
normalisation has six nodes instead of thirteen.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify.factors import join_chains


def join_factors(model: ir.Model, op: OpBuilder) -> int:
    """Join the factors of gradients, in place; return how many nodes became needless."""
    return join_chains(model, op)
