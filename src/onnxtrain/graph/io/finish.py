"""From a finished graph to a checked ModelProto."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.io.shared_weights import detach
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
    apart = detach(model)
    proto = ir.to_proto(model)
    if proto.ByteSize() < _CHECKABLE:
        try:
            onnx.checker.check_model(_without_files(proto) if apart else proto)
        except onnx.checker.ValidationError as error:
            raise PrepareError(
                f"the result is not a valid ONNX model: {first_line(error)}\n"
                "hint: check the model you gave with onnx.checker, and the rules you registered"
            ) from error
    return proto


def _without_files(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model to check: weights that lie in files are inputs of it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    outside = [t for t in copy.graph.initializer if t.external_data]
    for tensor in outside:
        kind = copy.graph.input.add(name=tensor.name).type.tensor_type
        kind.elem_type = tensor.data_type
        kind.shape.SetInParent()
        for size in tensor.dims:
            kind.shape.dim.add(dim_value=size)
        copy.graph.initializer.remove(tensor)
    return copy
