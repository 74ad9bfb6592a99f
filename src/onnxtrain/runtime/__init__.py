"""Models on stock ONNX Runtime: the only package that imports it."""
