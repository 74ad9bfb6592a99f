"""Which operators of onnxruntime's CPU kernels need no new memory for their result."""

from __future__ import annotations

import onnx_ir as ir

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Their result is their first input with another shape."""

_IN_PLACE = {
    "Cast": 0,
    "Clip": 0,
    "Elu": 0,
    "FusedConv": 3,
    "HardSigmoid": 0,
    "LeakyRelu": 0,
    "LogSoftmax": 0,
    "QuickGelu": 0,
    "Relu": 0,
    "Scatter": 0,
    "ScatterElements": 0,
    "Selu": 0,
    "Sigmoid": 0,
    "Softmax": 0,
    "Softplus": 0,
    "Softsign": 0,
    "Tanh": 0,
    "ThresholdedRelu": 0,
    "Trilu": 0,
}
"""The input whose memory the result may take, if nobody else reads it any more."""


def is_view(node: ir.Node) -> bool:
    """Return whether a node's result is its first input's memory."""
    return node.domain == "" and node.op_type in VIEWS


def may_write_over(node: ir.Node) -> int | None:
    """Return the input whose memory a node may give to its first result."""
    return _IN_PLACE.get(node.op_type)
