"""Training on stock ONNX Runtime."""

from onnxtrain.runtime.callbacks import Best, Callback, EarlyStopping
from onnxtrain.runtime.evaluation import Evaluation
from onnxtrain.runtime.results import Parameters, StepResult
from onnxtrain.runtime.run import History, Run
from onnxtrain.runtime.trainer import Trainer

__all__ = [
    "Best",
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "History",
    "Parameters",
    "Run",
    "StepResult",
    "Trainer",
]
