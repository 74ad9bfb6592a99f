"""Operators written with others, for runtimes that have no kernel for them.

A function gets the builder, the node's inputs and its attributes by name. It returns the result, or
``None`` if it does not apply to this node.
"""

from onnxtrain.graph.composed.celu import celu
from onnxtrain.graph.composed.col2im import col2im
from onnxtrain.graph.composed.det import det
from onnxtrain.graph.composed.dft import dft
from onnxtrain.graph.composed.group_norm import group_normalization

__all__ = ["celu", "col2im", "det", "dft", "group_normalization"]
