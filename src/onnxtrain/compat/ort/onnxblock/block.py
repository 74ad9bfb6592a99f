"""What a block is: a piece of a graph that builds itself on the active model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import onnx

from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.compat.ort.onnxblock.accessor import active


class Block(ABC):
    """A piece of a graph; a call builds it on the active model and gives the name of its output.

    Args:
        temp_file_name: not used, nothing is written; an absolute path is refused as it always was.
    """

    base: onnx.ModelProto
    """The live model, while the block is built and afterwards."""

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        if os.path.isabs(temp_file_name):
            raise OrtError("Please pass in a relative path for the temp_file_name.")

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add nodes to ``self.base``; return the name of the output, or names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the active model; return what ``build`` gives."""
        self.base = active().model
        return self.build(*args, **kwargs)

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Return the active model with the shapes of its values written down."""
        return onnx.shape_inference.infer_shapes(active().model)
