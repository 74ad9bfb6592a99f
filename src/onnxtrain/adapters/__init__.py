"""Adapters: small trainable matrices beside the frozen layers of a model."""

from onnxtrain.adapters.adapted import Adapted, Adapter
from onnxtrain.adapters.lora import lora

__all__ = ["Adapted", "Adapter", "lora"]
