"""Resize that repeats each position a whole number of times, as nearest neighbours do.

Where an output position lies is ``i / s`` rounded down, or ``(i + 0.5) / s - 0.5`` rounded to the
nearest: for a whole ``s`` that is ``i // s``, and no tie is met.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D

_ROUNDING = {
    "asymmetric": frozenset({"floor"}),
    "half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
    "pytorch_half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
}


def repeats(node: ir.Node, opset: int) -> list[int] | None:
    """Return how often a Resize repeats positions along each axis of an image, if that is all."""
    x, options = node.inputs[0], S.attributes_of(node, opset)
    rounding = _ROUNDING.get(options["coordinate_transformation_mode"], frozenset())
    if x is None or options["mode"] != "nearest" or options["nearest_mode"] not in rounding:
        return None
    if options.get("axes") or options.get("keep_aspect_ratio_policy") not in (None, "stretch"):
        return None
    old, new = S.dims_of(x), S.dims_of(node.outputs[0])
    if old is None or new is None or len(old) - 2 not in (1, 2, 3) or old[:2] != new[:2]:
        return None
    before, after = D.numbers(old[1:]), D.numbers(new[1:])
    if before is None or after is None or min(before) < 1:
        return None
    factors = [b // a for a, b in zip(before, after, strict=True)]
    if factors != [b / a for a, b in zip(before, after, strict=True)]:
        return None
    scales = (*node.inputs, None, None)[2]
    if scales is not None and S.dims_of(scales) != (0,):
        given = S.constant_of(scales)
        if given is None or not np.array_equal(given[1:], factors) or given[0] != 1.0:
            return None
    return factors[1:]


def repeated(
    op: OpBuilder, x: ir.Value, *_unused: ir.Value | None, node: ir.Node
) -> ir.Value | None:
    """Return what a Resize makes of 16-bit images, by axes that are spread."""
    factors = repeats(node, op.opset)
    sizes = D.numbers(op.dims(x)[1:])
    if x.dtype != ir.DataType.BFLOAT16 or factors is None or sizes is None:
        return None
    apart = [n for size in sizes[1:] for n in (size, 1)]
    spread = [n for factor in factors for n in (1, factor)]
    wide = op.Expand(op.Reshape(x, [-1, sizes[0], *apart]), op.const([1, 1, *spread]))
    joined = [size * factor for size, factor in zip(sizes[1:], factors, strict=True)]
    return op.Reshape(wide, [-1, sizes[0], *joined])


__all__ = ["repeated", "repeats"]
