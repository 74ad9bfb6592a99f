"""Operators of ``ai.onnx.ml`` that hold numbers in attributes, as tensors of standard operators."""

from onnxtrain.graph.prepare.classical import features, linear  # noqa: F401 - fills the table
from onnxtrain.graph.prepare.classical.rewrite import rewrite_classical

__all__ = ["rewrite_classical"]
