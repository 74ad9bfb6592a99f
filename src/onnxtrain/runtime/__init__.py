"""Training on stock ONNX Runtime."""

from onnxtrain.runtime.trainer import Parameters, StepResult, Trainer

__all__ = ["Parameters", "StepResult", "Trainer"]
