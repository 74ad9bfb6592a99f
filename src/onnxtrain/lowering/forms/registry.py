"""The table of forms: how older opsets write the operators of the working opset.

A form is registered for an operator and the opset from which on it is not needed any more; it
changes a ``Draft``, or raises ``UnfitError``. The newest form comes first, so each one starts from
what the next opset has.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.forms.draft import Draft, UnfitError, fit

Form = Callable[[Draft], None]
_FORMS: dict[str, list[tuple[int, Form]]] = {}


def form(*op_types: str, below: int) -> Callable[[Form], Form]:
    """Register the form of some operators at opsets below a number."""

    def register(function: Form) -> Form:
        for op_type in op_types:
            _FORMS.setdefault(op_type, []).append((below, function))
            _FORMS[op_type].sort(key=lambda entry: -entry[0])
        return function

    return register


def draft_at(node: ir.Node, opset: int, working: int) -> Draft:
    """Return a node in the form that an opset has for it.

    Raises:
        UnfitError: if the opset cannot express it.
    """
    drafted = Draft(node.op_type, list(node.inputs), dict(node.attributes), node, working)
    if not is_standard(node):
        raise UnfitError(f"an operator of domain {node.domain!r}")
    _positive_axes(drafted, needed=opset < 11)
    for below, function in _FORMS.get(node.op_type, ()):
        if opset < below:
            function(drafted)
    fit(drafted, opset)
    return drafted


_AXIS = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "Concat",
        "CumSum",
        "Flatten",
        "Gather",
        "GatherElements",
        "Hardmax",
        "LayerNormalization",
        "LogSoftmax",
        "LpNormalization",
        "OneHot",
        "ScatterElements",
        "Softmax",
        "Split",
        "TopK",
    ]
)


def _positive_axes(d: Draft, *, needed: bool) -> None:
    """Count the axis from the front: before opset 11 there is no other way."""
    if d.op_type not in _AXIS or not (needed or d.has_rank()):
        return
    axis = d.get("axis")
    if axis is not None and axis < 0:
        d.set("axis", axis + d.rank() + (d.op_type == "OneHot"))  # OneHot adds an axis
