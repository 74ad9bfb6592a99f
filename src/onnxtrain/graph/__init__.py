"""Load, check, edit and write ONNX graphs; infer shapes, simplify, estimate memory."""
