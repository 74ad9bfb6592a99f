"""Training on the device: state, module, optimizer, schedule."""

from onnxtrain.compat.ort.api.checkpoint_state import CheckpointState
from onnxtrain.compat.ort.api.lr_scheduler import LinearLRScheduler
from onnxtrain.compat.ort.api.module import Module
from onnxtrain.compat.ort.api.optimizer import Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]
