"""Files that adapters go to: PEFT directories, ``.onnx_adapter``, merged models."""
