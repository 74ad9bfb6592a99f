"""What several commands take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from onnxtrain.errors import PrepareError
from onnxtrain.training import Trainer
from onnxtrain.training.data_files import read_data

Model = Annotated[Path, typer.Argument(help="An .onnx file.")]
Wrt = Annotated[
    list[str] | None,
    typer.Option("--wrt", help="Name or glob of an initializer or input; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Directory = Annotated[Path, typer.Argument(help="A directory that `onnxtrain build` has made.")]
Data = Annotated[
    Path,
    typer.Option(
        help="An .npz, .csv or .jsonl file, or a folder with a folder of pictures per class."
    ),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights to take; else those in the directory.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores by default.")]
_CLASSES = "classes:"


def read_size(text: str) -> tuple[str, int]:
    """Return name and number of ``batch=32``."""
    name, equals, value = text.partition("=")
    if not equals or not value.isdecimal():
        raise PrepareError(f"not a size: {text!r}\nhint: --dim batch=32")
    return name, int(value)


def read_for(trainer: Trainer, path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file or folder for a trainer.

    Where labels are texts, or folders of pictures, the trainer's checkpoints keep which number
    stands for which: it is the same for training, validation and all later evaluation.
    """
    kept = {
        name.removeprefix(_CLASSES): json.loads(str(texts))
        for name, texts in trainer.properties.items()
        if name.startswith(_CLASSES)
    }
    data = read_data(path, trainer.batch_specs, kept)
    for name, texts in data.classes.items():
        trainer.properties[_CLASSES + name] = json.dumps(texts)
    return data.arrays
