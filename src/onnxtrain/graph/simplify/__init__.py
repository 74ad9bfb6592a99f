"""Removal of what a graph does not need, valid for every runtime."""

from onnxtrain.graph.simplify.redundant import RANDOM, remove_dead, remove_identities, simplify

__all__ = ["RANDOM", "remove_dead", "remove_identities", "simplify"]
