"""``onnxruntime.training.experimental``: export the gradient graph of a module."""

from onnxtrain.torch import export_gradient_graph

__all__ = ["export_gradient_graph"]
