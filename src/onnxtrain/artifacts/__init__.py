"""Training artifacts: built from a model, saved as a directory that trains anywhere."""

from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.precision import Precision
from onnxtrain.artifacts.trainable import load_weights
from onnxtrain.optim.optimizer import Clip

__all__ = ["Artifacts", "Clip", "Precision", "load_weights"]
