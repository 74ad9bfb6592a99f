"""Columns of features by their numbers, where only inference tells the rank."""

from __future__ import annotations

from onnxtrain.graph.prepare.decompose import decomposition


@decomposition("ai.onnx.ml::ArrayFeatureExtractor")
def array_feature_extractor(op, x, at):
    """Gather along the last axis; a vector gives a row."""
    flat = op.Reshape(at, op.const([-1]))
    columns = op.Gather(x, flat, axis=op.rank(x) - 1)
    return columns if op.rank(x) > 1 else op.Unsqueeze(columns, [0])
