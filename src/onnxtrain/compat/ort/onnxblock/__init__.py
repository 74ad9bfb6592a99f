"""Building blocks of training graphs, on a live ModelProto."""

from onnxtrain.compat.ort.onnxblock import blocks, loss, optim
from onnxtrain.compat.ort.onnxblock.blocks import Block
from onnxtrain.compat.ort.onnxblock.checkpoint_utils import (
    load_checkpoint_to_model,
    save_checkpoint,
)
from onnxtrain.compat.ort.onnxblock.model import base, custom_op_library, empty_base
from onnxtrain.compat.ort.onnxblock.models import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
