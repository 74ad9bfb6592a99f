"""Checkpoint files: safetensors with our metadata, and the files of onnxruntime-training."""

from onnxtrain.checkpoint.safetensors_file import (
    from_bytes,
    from_file,
    load_checkpoint,
    read_metadata,
    save_checkpoint,
    state_key,
    to_bytes,
)

__all__ = [
    "from_bytes",
    "from_file",
    "load_checkpoint",
    "read_metadata",
    "save_checkpoint",
    "state_key",
    "to_bytes",
]
