"""From anything that is a model to the normal form, with operators expanded that have only a body."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.registry import USER_RULES
from onnxtrain.graph.io import load
from onnxtrain.graph.prepare import prepare


def open_model(model: str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model) -> ir.Model:
    """Give the model in the normal form; the argument is not changed."""
    domains = {key.split("::")[0] for key in USER_RULES if "::" in key}
    return prepare(load(model, allow_domains=domains))
