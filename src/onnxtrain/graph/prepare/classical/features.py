"""What stands before a model: scaling, choosing and filling in of features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.prepare.classical.rewrite import Writer, classical


@classical("Scaler")
def scaler(op: Writer) -> Sequence[ir.Value]:
    """``(x - offset) * scale``."""
    x = op.float_input()
    offset, scale = op.floats("offset"), op.floats("scale")
    if offset.size:
        x = op.op("Sub", x, op.constant(offset))
    return [op.op("Mul", x, op.constant(scale))] if scale.size else [op.op("Identity", x)]


@classical("Binarizer")
def binarizer(op: Writer) -> Sequence[ir.Value]:
    """One above the threshold, else zero."""
    above = op.op("Greater", op.float_input(), op.constant([op.attribute("threshold", 0.0)]))
    return [op.op("Cast", above, to=int(ir.DataType.FLOAT))]


@classical("Imputer")
def imputer(op: Writer) -> Sequence[ir.Value] | None:
    """Another value in the place of the one that stands for a missing one."""
    values = op.floats("imputed_value_floats")
    x = op.node.inputs[0]
    if not values.size or x is None or x.dtype != ir.DataType.FLOAT:
        return None
    missing = op.attribute("replaced_value_float", 0.0)
    if np.isnan(missing):
        return [op.op("Where", op.op("IsNaN", x), op.constant(values), x)]
    # Equal of floats is younger than most such files.
    at = op.constant([missing])
    other = op.op("Or", op.op("Less", x, at), op.op("Greater", x, at))
    return [op.op("Where", op.op("Or", other, op.op("IsNaN", x)), x, op.constant(values))]


@classical("Normalizer")
def normalizer(op: Writer) -> Sequence[ir.Value] | None:
    """Rows divided by their norm; a row of zeros stays."""
    norm = op.attribute("norm", "MAX")
    norm = norm.decode() if isinstance(norm, bytes) else norm
    x = op.float_input()
    if norm not in ("L1", "L2"):
        return None
    total = op.row_sums(op.op("Abs", x) if norm == "L1" else op.op("Mul", x, x))
    used = op.op("Greater", total, op.constant([0.0]))
    safe = op.op("Where", used, total, op.constant([1.0]))
    return [op.op("Div", x, safe if norm == "L1" else op.op("Sqrt", safe))]
