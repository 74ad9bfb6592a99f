"""How much memory a graph takes when onnxruntime runs it: order of nodes, lifetimes, arena."""

from onnxtrain.graph.memory.arena import Arena
from onnxtrain.graph.memory.choose_order import order_for_memory
from onnxtrain.graph.memory.lifetimes import Event, lifetimes
from onnxtrain.graph.memory.peak import Sizes, peak_of
from onnxtrain.graph.memory.run_order import run_order
from onnxtrain.graph.memory.symbolic_peak import symbolic_peaks

__all__ = [
    "Arena",
    "Event",
    "Sizes",
    "lifetimes",
    "order_for_memory",
    "peak_of",
    "run_order",
    "symbolic_peaks",
]
