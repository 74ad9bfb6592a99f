"""What the formulas for symbolic shapes and elements have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes.dims import Dim

Attributes = dict[str, Any]
"""Attributes of a node as Python values, defaults filled in."""

Formula = Callable[[ir.Node, Attributes], Sequence[Dim] | None]
"""Returns dimensions (or elements of a small integer tensor), ``None`` where nothing is known."""


def input_of(node: ir.Node, i: int) -> ir.Value | None:
    """Return an input by position, ``None`` if it is left out."""
    return node.inputs[i] if i < len(node.inputs) else None


def dims_in(node: ir.Node, i: int = 0) -> tuple[Dim, ...] | None:
    """Return the dimensions of an input, ``None`` if it is left out or of unknown rank."""
    x = input_of(node, i)
    return None if x is None else S.dims_of(x)


def elements_in(node: ir.Node, i: int) -> tuple[Dim, ...] | None:
    """Return the elements of a small integer input as far as they are known."""
    return S.symbolic_of(input_of(node, i))


def count_in(node: ir.Node, i: int) -> int | None:
    """Return the length of a vector input (of axes, of a shape) whose elements are not known."""
    dims = dims_in(node, i)
    return dims[0] if dims is not None and len(dims) == 1 and isinstance(dims[0], int) else None


def slice_end(end: int, step: int) -> int | None:
    """Return the end of a Python slice: counting down to the least number means to the start."""
    return None if step < 0 and end <= -(2**31) else end
