"""Know before you train: the memory of a run, predicted, and what would fit a budget."""

from onnxtrain.planning.memory_plan import Alternative, Plan, plan

__all__ = ["Alternative", "Plan", "plan"]
