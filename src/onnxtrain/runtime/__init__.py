"""Training on stock ONNX Runtime."""

from onnxtrain.runtime.results import Parameters, StepResult
from onnxtrain.runtime.trainer import Trainer

__all__ = ["Parameters", "StepResult", "Trainer"]
