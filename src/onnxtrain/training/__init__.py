"""Training on stock ONNX Runtime."""

from onnxtrain.training.callbacks import Best, Callback, EarlyStopping
from onnxtrain.training.evaluation import Evaluation
from onnxtrain.training.results import Parameters, StepResult
from onnxtrain.training.run import History, Run
from onnxtrain.training.trainer import Trainer

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
