"""Differentiate and train any ONNX model in standard operators, on stock ONNX Runtime."""

from onnxtrain.autodiff.explain import Report, explain
from onnxtrain.autodiff.gradients import grad, jvp, parameters, vjp
from onnxtrain.autodiff.registry import register_vjp
from onnxtrain.autodiff.split import Split, split
from onnxtrain.graph.io import load

__version__ = "0.1.0"

__all__ = [
    "Report",
    "Split",
    "explain",
    "grad",
    "jvp",
    "load",
    "parameters",
    "register_vjp",
    "split",
    "vjp",
]
