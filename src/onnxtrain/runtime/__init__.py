"""Models on stock ONNX Runtime: the only package that imports it."""

from onnxtrain.deprecated import aliases

# They are a layer higher now; nothing here imports them.
_TRAINING = (
    "Best",
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "History",
    "Parameters",
    "Run",
    "StepResult",
    "Trainer",
)

__getattr__ = aliases(__name__, {name: f"onnxtrain.training.{name}" for name in _TRAINING})
