"""Optimizers as ONNX graphs, and learning-rate schedules."""

from onnxtrain.deprecated import aliases
from onnxtrain.optim.base import OPTIMIZERS, Optimizer, ParamGroup, resolve
from onnxtrain.optim.clip import clip_by_global_norm, clip_by_value, global_norm, moving_average
from onnxtrain.optim.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    RMSprop,
)
from onnxtrain.optim.privacy import DP
from onnxtrain.optim.schedules import (
    SCHEDULES,
    Chain,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    ReduceOnPlateau,
    Schedule,
    Step,
    Warmup,
    resolve_schedule,
)
from onnxtrain.optim.transforms import Slot

__all__ = [
    "DP",
    "LAMB",
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Chain",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Linear",
    "Lion",
    "MultiStep",
    "OneCycle",
    "Optimizer",
    "ParamGroup",
    "Polynomial",
    "RMSprop",
    "ReduceOnPlateau",
    "Schedule",
    "Slot",
    "Step",
    "Warmup",
    "clip_by_global_norm",
    "clip_by_value",
    "global_norm",
    "moving_average",
    "resolve",
    "resolve_schedule",
]

__getattr__ = aliases(__name__, {"Group": "onnxtrain.optim.ParamGroup"})
