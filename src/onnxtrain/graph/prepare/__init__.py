"""From any ONNX graph to the normal form that every later stage may assume."""

from onnxtrain.graph.prepare.hidden_weights import show_weights
from onnxtrain.graph.prepare.normal_form import (
    constant_names,
    mark_constants,
    prepare,
    repairs_of,
    unused_parameters,
)

__all__ = [
    "constant_names",
    "mark_constants",
    "prepare",
    "repairs_of",
    "show_weights",
    "unused_parameters",
]
