"""Adapters: small trainable matrices beside the frozen layers of a model."""

from onnxtrain.adapters.branches import Adapter
from onnxtrain.adapters.lora import Adapted, load_adapter, lora
from onnxtrain.adapters.merge import MergeResult

__all__ = ["Adapted", "Adapter", "MergeResult", "load_adapter", "lora"]
