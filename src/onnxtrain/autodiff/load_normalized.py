"""From anything that is a model to the normal form that the rules know."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.registry import NO_GRADIENT, RULES, USER_RULES, ZERO
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.prepare import prepare


def load_normalized(model: Source) -> ir.Model:
    """Return the model in the normal form; the argument is not changed.

    Operators without a rule whose body the ONNX standard gives are replaced by it.
    """
    return prepare(load(model, allow_domains=own_domains()), inline=lacks_rule, keep=has_rule)


def own_domains() -> set[str]:
    """Return the domains for which the user registered rules."""
    return {key.split("::")[0] for key in USER_RULES if "::" in key}


def has_rule(key: str) -> bool:
    """Return whether an operator of another domain has a rule, so that it stays as it is."""
    return key in USER_RULES or key in RULES


def lacks_rule(op_type: str) -> bool:
    """Return whether nothing is registered for a standard operator."""
    return not any(op_type in table for table in (USER_RULES, RULES, ZERO, NO_GRADIENT))
