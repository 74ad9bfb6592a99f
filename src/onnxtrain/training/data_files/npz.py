"""Arrays by name in one file of numpy's."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io.regular_file import open_regular

HINT = "hint: numpy.savez('train.npz', x=..., labels=...)"
_NPY, _ZIP = b"\x93NUMPY", b"PK"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name.

    Raises:
        OnnxTrainError: it cannot be read, or is not such a file.
    """
    try:
        with open_regular(path) as raw:
            return _arrays(raw, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OnnxTrainError(f"{path}: cannot be read: {reason}\n{HINT}") from error


def _arrays(raw: BinaryIO, path: Path) -> dict[str, np.ndarray]:
    start = raw.read(len(_NPY))
    raw.seek(0)
    if start == _NPY:
        raise OnnxTrainError(f"{path}: a single array, whose name is not known\n{HINT}")
    if not start.startswith(_ZIP):
        raise OnnxTrainError(
            f"{path}: not an .npz file\n{HINT}; .csv, .jsonl and folders of pictures are read too"
        )
    try:
        with np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # damaged zip files raise anything
        reason = str(error) or type(error).__name__
        raise OnnxTrainError(f"{path}: not an .npz file of arrays: {reason}\n{HINT}") from error
    odd = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if odd:
        raise OnnxTrainError(f"{path}: {odd[0]!r} is no array\n{HINT}")
    return arrays
