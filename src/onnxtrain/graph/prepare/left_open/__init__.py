"""Shapes that a file leaves open, decided by what reads them."""

from onnxtrain.graph.prepare.left_open.loop_states import pin_loop_states
from onnxtrain.graph.prepare.left_open.squeezes import explicit_squeezes

__all__ = ["explicit_squeezes", "pin_loop_states"]
