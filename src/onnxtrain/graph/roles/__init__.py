"""Parameters by role: what of a file's tensors trains, and why the rest does not."""

from onnxtrain.graph.roles.assign import PARAMETERS, lift_weights, roles
from onnxtrain.graph.roles.role import Role, note_roles, roles_of, summary

__all__ = ["PARAMETERS", "Role", "lift_weights", "note_roles", "roles", "roles_of", "summary"]
