"""Parameters by role: what of a file's tensors trains, and why the rest does not."""

from onnxtrain.graph.roles.assign import (
    ADAPTERS,
    FROZEN,
    PARAMETERS,
    kinds_by_use,
    lift_weights,
    roles,
)
from onnxtrain.graph.roles.role import Role, kinds, note_kinds, note_roles, roles_of, summary

__all__ = [
    "ADAPTERS",
    "FROZEN",
    "PARAMETERS",
    "Role",
    "kinds",
    "kinds_by_use",
    "lift_weights",
    "note_kinds",
    "note_roles",
    "roles",
    "roles_of",
    "summary",
]
