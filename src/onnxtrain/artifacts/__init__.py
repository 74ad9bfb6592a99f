"""Training artifacts: built from a model, saved as a directory that trains anywhere."""

from onnxtrain.artifacts.build import Clip, build
from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.precision import Precision
from onnxtrain.artifacts.pretrained_weights import load_weights

__all__ = ["Artifacts", "Clip", "Precision", "build", "load_weights"]
