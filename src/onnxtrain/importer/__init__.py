"""From any ONNX graph to the normal form that every later stage may assume."""

from onnxtrain.importer.constants import expose_weights
from onnxtrain.importer.normal_form import (
    constant_names,
    mark_constants,
    prepare,
    repairs_of,
    unused_parameters,
)

__all__ = [
    "constant_names",
    "expose_weights",
    "mark_constants",
    "prepare",
    "repairs_of",
    "unused_parameters",
]
