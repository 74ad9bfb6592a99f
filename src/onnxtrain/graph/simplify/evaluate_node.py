"""What one node gives for known inputs, by the reference implementation of the standard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

_UNREAD = (ir.DataType.BFLOAT16, ir.DataType.STRING)


def evaluate_node(
    node: ir.Node, arrays: Mapping[ir.Value, np.ndarray], opset: int
) -> np.ndarray | None:
    """Return a node's only output as an array of its type; ``None`` if that cannot be told."""
    given = [x for x in node.inputs if x is not None]
    if any(x.dtype in _UNREAD for x in given):
        return None
    graph = onnx.GraphProto(name="fold", node=[ir.serde.serialize_node(node)])
    feeds = {x.name or "": arrays[x] for x in given}
    for name in feeds:
        graph.input.append(onnx.ValueInfoProto(name=name))
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=opset)]
    )
    from onnx.reference import ReferenceEvaluator  # large, and not needed to train

    try:
        with np.errstate(all="ignore"):
            (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError):
        return None  # the node stays; the runtime will say what is wrong with it, if anything
    array = np.asarray(array)
    y = node.outputs[0]
    return array if y.dtype is not None and array.dtype == y.dtype.numpy() else None


__all__ = ["evaluate_node"]
