"""Removal of what a graph does not need, valid for every runtime."""

from onnxtrain.graph.simplify.dead_code import RANDOM_OPS, remove_dead, remove_identities, simplify

__all__ = ["RANDOM_OPS", "remove_dead", "remove_identities", "simplify"]
