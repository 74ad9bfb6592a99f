"""From a finished graph to a checked ModelProto."""

from __future__ import annotations

import onnx
import onnx_ir as ir

PRODUCER = "onnxtrain"
_CHECKABLE = 1 << 30  # bytes: the checker wants a single protobuf below 2 GB


def finish(model: ir.Model) -> onnx.ModelProto:
    """Stamp, serialise and check a model."""
    model.producer_name = PRODUCER
    proto = ir.to_proto(model)
    if proto.ByteSize() < _CHECKABLE:
        onnx.checker.check_model(proto)
    return proto
