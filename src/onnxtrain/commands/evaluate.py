"""``onnxtrain eval``: loss and metrics over data in a file."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Checkpoint, Data, Device, Directory, Json, Threads, read_for
from onnxtrain.training import Trainer


def evaluate(
    directory: Directory,
    data: Data,
    checkpoint: Checkpoint = None,
    batch_size: Annotated[int | None, Option(help="256, or what the model is fixed to.")] = None,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Print loss and metrics in evaluation mode."""
    trainer = Trainer(directory, device=device, threads=threads)
    if checkpoint is not None:
        trainer.load(checkpoint)
    evaluation = trainer.evaluate(read_for(trainer, data), batch_size=batch_size)
    if as_json:
        typer.echo(json.dumps({**evaluation.to_dict(), "samples": evaluation.samples}))
        return
    for name, value in evaluation.to_dict().items():
        typer.echo(f"{name} {value:.6g}")
