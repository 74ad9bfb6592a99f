"""What the registry knows about an operator."""

from __future__ import annotations


def how(op: str) -> str | None:
    """How an operator is differentiated: rule, body, decomposed, zero or none; None if unknown."""
    from onnxtrain.autodiff import registry

    return registry.how(op)
