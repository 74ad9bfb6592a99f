"""How a graph behaves: training or evaluation, its random numbers, its precision."""

from onnxtrain.graph.modes.train_eval import (
    running_statistics,
    separate_statistics,
    to_evaluation,
    to_training,
)
from onnxtrain.graph.modes.values_per_channel import sizes_above_one

__all__ = [
    "running_statistics",
    "separate_statistics",
    "sizes_above_one",
    "to_evaluation",
    "to_training",
]
