"""From anything that is a model to the normal form that the rules know."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.registry import (
    KEPT,
    NO_GRADIENT,
    RULES,
    STRAIGHT,
    USER_RULES,
    ZERO,
    key_of,
    mark_straight_through,
)
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.prepare import prepare
from onnxtrain.targets import Target, find


def load_normalized(
    model: Source, target: str | Target = "cpu", *, straight_through: bool = False
) -> ir.Model:
    """Return the model in the normal form; the argument is not changed.

    Operators without a rule whose body the ONNX standard gives are replaced by it. Products with
    packed weights stay what they are if the target has them.

    Args:
        model: anything that ``load`` takes.
        target: what forms are chosen for.
        straight_through: whether gradients are to pass quantisers inside their range.
    """
    loaded = load(model, allow_domains=own_domains())

    def inline(op_type: str) -> bool:
        return lacks_rule(op_type) and not (straight_through and op_type in STRAIGHT)

    keep = kept_for(target)
    work = prepare(loaded, inline=inline, keep=keep, straight_through=straight_through)
    if straight_through:
        mark_straight_through(work.graph.all_nodes())
    return work


def own_domains() -> set[str]:
    """Return the domains for which the user registered rules."""
    return {key.split("::")[0] for key in USER_RULES if "::" in key}


def kept_for(target: str | Target) -> Callable[[ir.Node], bool]:
    """Return what tells of a node of another domain whether it has a rule and stays as it is."""
    fused = not find(target).lacks("MatMulNBits")

    def keep(node: ir.Node) -> bool:
        key = key_of(node)
        if key in USER_RULES:
            return "::" in key
        return fused and key in KEPT and KEPT[key](node)

    return keep


def lacks_rule(op_type: str) -> bool:
    """Return whether nothing is registered for a standard operator."""
    return not any(op_type in table for table in (USER_RULES, RULES, ZERO, NO_GRADIENT))
