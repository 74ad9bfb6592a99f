"""``onnxtrain lr-find``: a learning rate to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Data, Device, Directory, Json, Threads, read_for
from onnxtrain.training import Trainer, find_lr


def lr_find(
    directory: Directory,
    data: Data,
    output: Annotated[
        Path | None, Option("--output", "-o", help="A .png or .svg file for the curve.")
    ] = None,
    batch_size: Annotated[int | None, Option(help="32, or what the model is fixed to.")] = None,
    lowest: Annotated[float, Option(help="The first learning rate.")] = 1e-6,
    highest: Annotated[float, Option(help="The last one, unless the loss leaves before.")] = 1.0,
    steps: Annotated[int, Option(help="How many batches.")] = 100,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Try growing learning rates in a short run; print the one at which the loss falls fastest."""
    trainer = Trainer(directory, device=device, threads=threads)
    curve = find_lr(
        trainer,
        read_for(trainer, data),
        batch_size=batch_size,
        lowest=lowest,
        highest=highest,
        steps=steps,
    )
    if output is not None:
        curve.save(output)
    if as_json:
        numbers = {"lrs": curve.lrs, "losses": curve.losses, "suggestion": curve.suggestion}
        typer.echo(json.dumps(numbers))
        return
    typer.echo(f"learning rate {curve.suggestion:.2g}")
    typer.echo(f"next: onnxtrain train {directory} --data {data} --lr {curve.suggestion:.2g}")
