"""BatchNormalization in training mode needs more than one value per channel.

Of a single value, the mean is the value and the variance 0: whatever comes in, the bias comes out,
and the running statistics become those of one sample.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.nodes import nodes


def sizes_above_one(model: ir.Model) -> tuple[str, ...]:
    """Return sizes whose product must be above 1 in training: ``"batch"``, ``"batch*length"``.

    Raises:
        PrepareError: naming a node that has one value per channel in every batch.
    """
    wanted: dict[str, None] = {}
    for node in nodes(model.graph, "BatchNormalization"):
        mode, x = node.attributes.get("training_mode"), node.inputs[0]
        if mode is None or not mode.as_int() or x is None or x.shape is None:
            continue
        dims = [d for axis, d in enumerate(x.shape) if axis != 1]
        known = math.prod(d for d in dims if isinstance(d, int))
        names = [d.value or "" for d in dims if isinstance(d, ir.SymbolicDim)]
        if known == 1 and not names:
            raise PrepareError(
                f"BatchNormalization {node.name!r} has one value per channel: its input is "
                f"{list(x.shape)}, and in training mode it needs more\n"
                "hint: a larger batch, or mode='as-is', which takes the running statistics"
            )
        if known == 1 and all(name.isidentifier() for name in names):
            wanted["*".join(sorted(names))] = None
    return tuple(wanted)


__all__ = ["sizes_above_one"]
