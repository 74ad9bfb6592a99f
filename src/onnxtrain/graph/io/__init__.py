"""Model files: read without trust, written whole or not at all."""

from onnxtrain.graph.io.limits import Limits
from onnxtrain.graph.io.read_model import Source, load
from onnxtrain.graph.io.write_model import save

__all__ = ["Limits", "Source", "load", "save"]
