"""Optimizers as ONNX graphs, and learning-rate schedules."""

from onnxtrain.optim.clip import clip_by_global_norm, clip_by_value, global_norm, moving_average
from onnxtrain.optim.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Group,
    Lion,
    Optimizer,
    RMSprop,
)
from onnxtrain.optim.resolve import OPTIMIZERS, resolve
from onnxtrain.optim.transforms import Slot

__all__ = [
    "LAMB",
    "OPTIMIZERS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Optimizer",
    "RMSprop",
    "Slot",
    "clip_by_global_norm",
    "clip_by_value",
    "global_norm",
    "moving_average",
    "resolve",
]
