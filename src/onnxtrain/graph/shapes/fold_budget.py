"""How many elements a node makes of constants, so that nothing huge is computed to be dropped."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D

# Their outputs may be larger than all they read.
_MAKERS = frozenset(
    (
        *("BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand"),
        *("HammingWindow", "HannWindow", "MelWeightMatrix", "OneHot", "Pad", "Resize", "STFT"),
        *("Tile", "Upsample"),
    )
)


def within_elements(node: ir.Node, limit: int) -> bool:
    """Return whether a node whose inputs are constants makes no more than so many elements."""
    for y in node.outputs:
        sizes = D.numbers(S.dims_of(y))
        if sizes is not None and math.prod(sizes) > limit:
            return False
        if sizes is None and node.op_type in _MAKERS:
            return False
    return node.op_type != "Range" or _range_length(node) <= limit


def _range_length(node: ir.Node) -> float:
    bounds = [S.constant_of(x) for x in node.inputs]
    numbers = [float(b.reshape(-1)[0]) for b in bounds if b is not None and b.size == 1]
    if len(numbers) < 3 or not numbers[2] or not np.all(np.isfinite(numbers)):
        return math.inf
    start, stop, step = numbers
    return (stop - start) / step
