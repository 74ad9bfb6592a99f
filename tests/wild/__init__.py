"""Third-party ONNX files: what happens to each by default."""
