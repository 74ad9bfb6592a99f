"""How a graph behaves: training or evaluation, its random numbers, its precision."""

from onnxtrain.graph.modes.train_eval import (
    running_statistics,
    separate_statistics,
    to_evaluation,
    to_training,
)

__all__ = ["running_statistics", "separate_statistics", "to_evaluation", "to_training"]
