"""Know before you train: the memory of a run, predicted, and what would fit a budget."""

from onnxtrain.planning.plan import Plan, plan
from onnxtrain.planning.ways import Way

__all__ = ["Plan", "Way", "plan"]
