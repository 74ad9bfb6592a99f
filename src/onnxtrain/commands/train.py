"""``onnxtrain train``: a run over data in files."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from onnxtrain.commands.common import Data, Device, Directory, Threads, read_for
from onnxtrain.commands.from_options import Asked, with_flags_of
from onnxtrain.errors import OnnxTrainError
from onnxtrain.training import Trainer
from onnxtrain.training.checkpoint_rotation import CheckpointRotation
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.run import CHECKPOINTS


@with_flags_of(FitOptions)
def train(
    asked: Asked,
    directory: Directory,
    data: Data,
    *,
    seed: Annotated[int, Option(help="Of masks and of the order of the data.")] = 0,
    quiet: Annotated[bool, Option("--quiet", help="Show nothing on the way.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train artifacts; the trained weights become those of the directory."""
    trainer = Trainer(directory, device=device, seed=seed, threads=threads)
    asked = {"directory": directory / "run", "progress": not quiet, **asked}
    if asked.get("resume"):
        last = CheckpointRotation(asked["directory"] / CHECKPOINTS).newest()
        if last is None:
            raise OnnxTrainError(
                f"{asked['directory']}: there is no checkpoint to go on from\n"
                "hint: leave --resume out, or name the run's directory by --out"
            )
        trainer.properties = trainer.read(last).progress.properties
    arrays = read_for(trainer, data)
    if "validation" in asked:
        asked["validation"] = read_for(trainer, asked["validation"])
    history = trainer.fit(arrays, **asked)
    trainer.save(directory / trainer.manifest.checkpoint)
    ending = f" ({history.stopped})" if history.stopped else ""
    typer.echo(f"{directory}: trained up to step {trainer.global_step}{ending}")
