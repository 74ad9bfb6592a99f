"""``onnxtrain export``: the trained model, for any runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Checkpoint, Directory
from onnxtrain.errors import OnnxTrainError
from onnxtrain.training import Trainer
from onnxtrain.training.checkpoint_rotation import BEST
from onnxtrain.training.run import CHECKPOINTS


def export(
    directory: Directory,
    output: Annotated[Path, Option("--output", "-o", help="The .onnx file to write.")],
    checkpoint: Checkpoint = None,
    best: Annotated[
        bool, Option("--best", help="The best epoch of the run in DIRECTORY/run.")
    ] = False,
    ema: Annotated[bool, Option("--ema", help="The moving average of the weights.")] = False,
    fold: Annotated[bool, Option("--fold", help="Compute ahead what weights alone give.")] = False,
    opset: Annotated[int | None, Option(help="Of the file, if not the model's own.")] = None,
) -> None:
    """Write the inference model with the trained weights."""
    trainer = Trainer(directory)
    if best:
        if checkpoint is not None:
            raise OnnxTrainError("--best and --checkpoint name two sets of weights")
        checkpoint = directory / "run" / CHECKPOINTS / BEST
        if not checkpoint.exists():
            raise OnnxTrainError(
                f"{checkpoint}: there is no best epoch yet\n"
                "hint: a run with --out elsewhere has it there: --checkpoint OUT/checkpoints/"
                + BEST
            )
    if checkpoint is not None:
        trainer.load(checkpoint)
    trainer.export(output, ema=ema, fold=fold, opset=opset)
    typer.echo(f"{output}: {output.stat().st_size:,} bytes")
