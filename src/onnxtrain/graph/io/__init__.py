"""Read untrusted model files and write models atomically."""

from onnxtrain.graph.io.limits import Limits
from onnxtrain.graph.io.reader import CheckedModel, Source, load
from onnxtrain.graph.io.writer import save

__all__ = ["CheckedModel", "Limits", "Source", "load", "save"]
