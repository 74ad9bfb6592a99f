"""``onnxtrain export``: the trained model, for any runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Checkpoint, Directory
from onnxtrain.training import Trainer


def export(
    directory: Directory,
    output: Annotated[Path, Option("--output", "-o", help="The .onnx file to write.")],
    checkpoint: Checkpoint = None,
    ema: Annotated[bool, Option("--ema", help="The moving average of the weights.")] = False,
    fold: Annotated[bool, Option("--fold", help="Compute ahead what weights alone give.")] = False,
    opset: Annotated[int | None, Option(help="Of the file, if not the model's own.")] = None,
) -> None:
    """Write the inference model with the trained weights."""
    trainer = Trainer(directory)
    if checkpoint is not None:
        trainer.load(checkpoint)
    trainer.export(output, ema=ema, fold=fold, opset=opset)
    typer.echo(f"{output}: {output.stat().st_size:,} bytes")
