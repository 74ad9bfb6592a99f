"""Adapters: small trainable matrices beside the frozen layers of a model."""

from onnxtrain.adapters.adapted import Adapted, Adapter
from onnxtrain.adapters.load_adapter import load_adapter
from onnxtrain.adapters.lora import lora
from onnxtrain.adapters.merge import Merged

__all__ = ["Adapted", "Adapter", "Merged", "load_adapter", "lora"]
