"""Emit ONNX nodes by calling them."""

from onnxtrain.graph.builder.op_builder import TARGETS, Names, OpBuilder, names_in

__all__ = ["TARGETS", "Names", "OpBuilder", "names_in"]
