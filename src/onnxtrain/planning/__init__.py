"""Predict the memory of a training run, and find options that fit a budget."""

from onnxtrain.planning.memory_plan import Alternative, Plan, plan

__all__ = ["Alternative", "Plan", "plan"]
