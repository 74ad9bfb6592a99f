"""``onnxruntime.training.experimental``: a module's gradients as one file."""

from onnxtrain.torch import export_gradient_graph

__all__ = ["export_gradient_graph"]
