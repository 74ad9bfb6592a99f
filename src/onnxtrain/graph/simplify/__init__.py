"""Simplify graphs without changing results: dead code, duplicates, constant subgraphs, rewrites."""

from onnxtrain.graph.simplify.dead_code import RANDOM_OPS, remove_dead, remove_identities, simplify

__all__ = ["RANDOM_OPS", "remove_dead", "remove_identities", "simplify"]
