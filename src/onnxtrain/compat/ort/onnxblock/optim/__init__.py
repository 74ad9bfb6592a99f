"""Optimizers as blocks."""

from onnxtrain.compat.ort.onnxblock.optim.optim import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]
