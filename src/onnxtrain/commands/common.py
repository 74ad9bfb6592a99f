"""What several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import typer

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.io.regular_file import open_regular

Model = Annotated[Path, typer.Argument(help="An .onnx file.")]
Wrt = Annotated[
    list[str] | None,
    typer.Option("--wrt", help="Name or glob of an initializer or input; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Directory = Annotated[Path, typer.Argument(help="A directory that `onnxtrain build` has made.")]
Data = Annotated[Path, typer.Option(help="An .npz file with an array per input and target.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights to take; else those in the directory.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores by default.")]

_HINT = "hint: numpy.savez('train.npz', x=..., labels=...)"
_NPY, _ZIP = b"\x93NUMPY", b"PK"


def read_size(text: str) -> tuple[str, int]:
    """Return name and number of ``batch=32``."""
    name, equals, value = text.partition("=")
    if not equals or not value.isdecimal():
        raise PrepareError(f"not a size: {text!r}\nhint: --dim batch=32")
    return name, int(value)


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
        raise OnnxTrainError(f"{path}: cannot be read: {reason}\n{_HINT}") from error


def _arrays(raw: BinaryIO, path: Path) -> dict[str, np.ndarray]:
    start = raw.read(len(_NPY))
    raw.seek(0)
    if start == _NPY:
        raise OnnxTrainError(f"{path}: a single array, whose name is not known\n{_HINT}")
    if not start.startswith(_ZIP):
        raise OnnxTrainError(f"{path}: not an .npz file\n{_HINT}")
    try:
        with np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # damaged zip files raise anything
        reason = str(error) or type(error).__name__
        raise OnnxTrainError(f"{path}: not an .npz file of arrays: {reason}\n{_HINT}") from error
    odd = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if odd:
        raise OnnxTrainError(f"{path}: {odd[0]!r} is no array\n{_HINT}")
    return arrays
