"""Emit ONNX nodes by calling them."""

from onnxtrain.graph.builder.op_builder import Names, OpBuilder, names_in

__all__ = ["Names", "OpBuilder", "names_in"]
