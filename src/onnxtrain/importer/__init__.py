"""From any ONNX graph to the normal form that every later stage may assume."""

from onnxtrain.importer.constants import expose_weights
from onnxtrain.importer.normal_form import prepare
from onnxtrain.importer.prepared import Prepared, constant_names, mark_constants

__all__ = [
    "Prepared",
    "constant_names",
    "expose_weights",
    "mark_constants",
    "prepare",
]
