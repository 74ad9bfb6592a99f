"""Modes of a graph: training or evaluation, random numbers, mixed precision."""

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
