"""Counterpart of ``onnxcustom.utils``."""
