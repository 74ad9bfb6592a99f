"""Data as people have it: .npz, CSV and JSONL files, and folders of pictures."""

from onnxtrain.training.data_files.read import DataFile, read_data, read_pictures

__all__ = ["DataFile", "read_data", "read_pictures"]
