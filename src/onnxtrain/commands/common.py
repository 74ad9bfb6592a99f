"""What several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from onnxtrain.errors import OnnxTrainError, PrepareError

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


def read_size(text: str) -> tuple[str, int]:
    """Return name and number of ``batch=32``."""
    name, equals, value = text.partition("=")
    if not equals or not value.isdecimal():
        raise PrepareError(f"not a size: {text!r}\nhint: --dim batch=32")
    return name, int(value)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, EOFError) as error:
        raise OnnxTrainError(
            f"{path}: not an .npz file of arrays: {error}\n"
            "hint: numpy.savez('train.npz', x=..., labels=...)"
        ) from error
