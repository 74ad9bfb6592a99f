"""A contract about BatchNormalization in training mode: when its outputs are the batch's own.

The operator puts out ``momentum * old + (1 - momentum) * batch`` for mean and variance. With
momentum 0 that is the mean and the (population's) variance of the batch, whatever the old values.

``running_statistics`` makes nodes so, on targets that prefer it, and averages behind the node; the
gradient rule reads the batch's statistics from such a node, and does not compute them again.
"""

from __future__ import annotations

import onnx_ir as ir

_BATCH_ONLY = 0.0
_DEFAULT = 0.9  # the standard's


def momentum_of(node: ir.Node) -> float:
    """Return which part of the old statistics a BatchNormalization keeps."""
    momentum = node.attributes.get("momentum")
    return _DEFAULT if momentum is None else momentum.as_float()


def put_out_batch_statistics(node: ir.Node) -> None:
    """Make a BatchNormalization put out the statistics of the batch, and nothing of the old."""
    node.attributes["momentum"] = ir.AttrFloat32("momentum", _BATCH_ONLY)


def puts_out_batch_statistics(node: ir.Node) -> bool:
    """Return whether outputs 1 and 2 of a training node are the batch's mean and variance."""
    return momentum_of(node) == _BATCH_ONLY


__all__ = ["momentum_of", "put_out_batch_statistics", "puts_out_batch_statistics"]
