"""Training artifacts: built from a model, saved as a directory that trains anywhere."""

from onnxtrain.artifacts.build import Clip, build
from onnxtrain.artifacts.directory import Artifacts

__all__ = ["Artifacts", "Clip", "build"]
