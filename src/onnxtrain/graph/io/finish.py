"""From a finished graph to a checked ModelProto."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.io.strip import strip_traces
from onnxtrain.graph.shapes import first_line

PRODUCER = "onnxtrain"
_CHECKABLE = 1 << 30  # bytes: the checker wants a single protobuf below 2 GB


def finish(model: ir.Model) -> onnx.ModelProto:
    """Stamp, serialise and check a model.

    Raises:
        PrepareError: if the model is not valid ONNX.
    """
    model.producer_name = PRODUCER
    strip_traces(model)
    proto = ir.to_proto(model)
    if proto.ByteSize() < _CHECKABLE:
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            raise PrepareError(
                f"the result is not a valid ONNX model: {first_line(error)}\n"
                "hint: check the model you gave with onnx.checker, and the rules you registered"
            ) from error
    return proto
