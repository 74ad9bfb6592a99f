"""Nodes in the forms that older opsets have for them."""

from onnxtrain.lowering.forms import resize, standard  # noqa: F401 - fill the table
from onnxtrain.lowering.forms.apply import apply_forms
from onnxtrain.lowering.forms.draft import Draft, UnfitError, default_of
from onnxtrain.lowering.forms.registry import draft_at

__all__ = ["Draft", "UnfitError", "apply_forms", "default_of", "draft_at"]
