"""Training artifacts for an older opset: every model goes through the lowering stage."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxtrain.errors import LoweringError
from onnxtrain.lowering.api import lower

LARGE_AND_LOWERED = (
    "weights so large are kept in a file, which no lowering rewrites\n"
    "hint: build without opset, and lower what is exported"
)
_SCATTER = "\nhint: target='portable' gives gradients of pooling that scatter nothing"


def at_opset(models: Mapping[str, onnx.ModelProto], opset: int) -> dict[str, onnx.ModelProto]:
    """Return the models at an opset, each compared with what it came from.

    Raises:
        LoweringError: naming the model and its nodes that cannot be lowered, or that differ.
    """
    lowered = {}
    for name, model in models.items():
        try:
            lowered[name] = lower(model, opset=opset)
        except LoweringError as error:
            hint = _SCATTER if "Scatter" in str(error) else ""
            raise LoweringError(f"the {name} model: {error}{hint}") from error
    return lowered
