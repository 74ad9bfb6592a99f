"""How a graph behaves: training or evaluation, its random numbers, its precision."""

from onnxtrain.modes.train_eval import (
    running_statistics,
    sizes_above_one,
    to_evaluation,
    to_training,
    unshare_running_statistics,
)

__all__ = [
    "running_statistics",
    "sizes_above_one",
    "to_evaluation",
    "to_training",
    "unshare_running_statistics",
]
