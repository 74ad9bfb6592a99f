"""ONNX files that others made: what happens to each by default."""
