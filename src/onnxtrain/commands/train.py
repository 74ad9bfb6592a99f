"""``onnxtrain train``: a run over data in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Data, Device, Directory, Threads, read_npz
from onnxtrain.training import Trainer


def train(
    directory: Directory,
    data: Data,
    validation: Annotated[Path | None, Option(help="An .npz file to validate on.")] = None,
    epochs: Annotated[int, Option(help="How often to go through the data.")] = 1,
    batch_size: Annotated[int | None, Option(help="32, or what the model is fixed to.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate; else that of the build.")] = None,
    schedule: Annotated[str | None, Option(help="cosine, one_cycle, step:size=10 ...")] = None,
    warmup: Annotated[float, Option(help="Steps, or a part of all steps if below 1.")] = 0,
    seed: Annotated[int, Option(help="Of masks and of the order of the data.")] = 0,
    out: Annotated[
        Path | None, Option(help="Where records and checkpoints go; DIRECTORY/run by default.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint.")] = False,
    checkpoint_every: Annotated[int | None, Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int, Option(help="How many of the last checkpoints stay.")] = 3,
    monitor: Annotated[str | None, Option(help="By what the best epoch is chosen.")] = None,
    patience: Annotated[
        int | None, Option(help="End after so many epochs without a better one.")
    ] = None,
    debug_nan: Annotated[
        bool, Option("--debug-nan", help="Find the node that makes the first NaN.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Show nothing on the way.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train artifacts; the trained weights become those of the directory."""
    trainer = Trainer(directory, device=device, seed=seed, threads=threads)
    trainer.lr = trainer.lr if lr is None else lr
    history = trainer.fit(
        read_npz(data),
        epochs,
        batch_size=batch_size,
        validation=None if validation is None else read_npz(validation),
        schedule=schedule,
        warmup=warmup,
        progress=not quiet,
        directory=out or directory / "run",
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep=keep,
        monitor=monitor,
        patience=patience,
        debug_nan=debug_nan,
    )
    trainer.save(directory / trainer.manifest.checkpoint)
    ending = f" ({history.stopped})" if history.stopped else ""
    typer.echo(f"{directory}: trained up to step {trainer.global_step}{ending}")
