"""Load, normalise and write ONNX graphs."""
