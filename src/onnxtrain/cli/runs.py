"""``onnxtrain train``: a run over data in files.

``onnxtrain eval``: loss and metrics over data in a file.

``onnxtrain profile``: where the time of a step goes.

``onnxtrain export``: the trained model, for any runtime.

``onnxtrain lr-find``: a learning rate to begin with.

``onnxtrain example``: files to try the other commands on.

``onnxtrain finetune``: a model's own file, fine-tuned on texts or pictures.

``onnxtrain federate init | serve``: a federation of Flower over artifacts.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from typer import Argument, Option

from onnxtrain.cli.flags import (
    Checkpoint,
    Data,
    Device,
    Directory,
    Json,
    OptionValues,
    Threads,
    flags_from,
    read_size,
    read_trainer_data,
)
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model
from onnxtrain.federation.project import write_project
from onnxtrain.federation.serve import serve as serve_pages
from onnxtrain.federation.serve import superlink
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.finetune import FineTuneRun
from onnxtrain.graph.io.writer import as_save_error, write_text
from onnxtrain.training import Trainer, find_lr
from onnxtrain.training.fit import BEST, CHECKPOINTS, CheckpointRotation, FitOptions
from onnxtrain.training.profile import random_batch


@flags_from(FitOptions)
def train(
    option_values: OptionValues,
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
    option_values = {"directory": directory / "run", "progress": not quiet, **option_values}
    if option_values.get("resume"):
        last = CheckpointRotation(option_values["directory"] / CHECKPOINTS).newest()
        if last is None:
            raise OnnxTrainError(
                f"{option_values['directory']}: there is no checkpoint to go on from\n"
                "hint: leave --resume out, or name the run's directory by --out"
            )
        trainer.properties = trainer.read(last).progress.properties
    arrays = read_trainer_data(trainer, data)
    if "validation" in option_values:
        option_values["validation"] = read_trainer_data(trainer, option_values["validation"])
    history = trainer.fit(arrays, **option_values)
    trainer.save(directory / trainer.manifest.checkpoint)
    ending = f" ({history.stopped})" if history.stopped else ""
    typer.echo(f"{directory}: trained up to step {trainer.global_step}{ending}")


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
    evaluation = trainer.evaluate(read_trainer_data(trainer, data), batch_size=batch_size)
    if as_json:
        typer.echo(json.dumps({**evaluation.to_dict(), "samples": evaluation.samples}))
        return
    for name, value in evaluation.to_dict().items():
        typer.echo(f"{name} {value:.6g}")


def profile(
    directory: Directory,
    data: Annotated[
        Path | None, Option(help="As for train; random inputs by default.", show_default=False)
    ] = None,
    batch_size: Annotated[int | None, Option(help="32, or the model's fixed batch size.")] = None,
    dim: Annotated[
        list[str] | None, Option(help="A symbolic size of random inputs: length=128; repeatable.")
    ] = None,
    steps: Annotated[int, Option(help="Number of steps to average over.")] = 10,
    layout: Annotated[str, Option(help="auto, fused, separate or vector.")] = "auto",
    trace: Annotated[
        Path | None, Option(help="Chrome trace to write, for Perfetto or chrome://tracing.")
    ] = None,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Show where the time of a training step goes; the artifacts do not change."""
    trainer = Trainer(directory, device=device, threads=threads, layout=layout)
    if data is None:
        sizes = dict(read_size(d) for d in dim or ())
        batch = random_batch(trainer.batch_specs, sizes, batch_size)
    else:
        rows = batch_size or trainer.fixed_batch or 32
        batch = {n: a[:rows] for n, a in read_trainer_data(trainer, data).items()}
    report = trainer.profile(batch, steps=steps, trace=trace)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        Console().print(report, highlight=False)


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
        read_trainer_data(trainer, data),
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


def example(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path(),
) -> None:
    """Write a small net and drawn digits: model.onnx, train.npz, test.npz and train.csv."""
    with as_save_error(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    digits_model(folder / "model.onnx")
    train, test = digits_data(1200, seed=0), digits_data(300, seed=1)
    with as_save_error(str(folder)):
        np.savez(folder / "train.npz", image=train["image"], labels=train["labels"])
        np.savez(folder / "test.npz", image=test["image"], labels=test["labels"])
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*(f"image.{i}" for i in range(64)), "labels"])
    for image, label in zip(train["image"], train["labels"], strict=True):
        writer.writerow([*(f"{x:.4g}" for x in image), int(label)])
    write_text(folder / "train.csv", table.getvalue())
    typer.echo(f"{folder}: model.onnx, train.npz, test.npz, train.csv")


@flags_from(FineTuneOptions)
def finetune(
    option_values: OptionValues,
    model: Annotated[Path, Argument(help="An .onnx file, or the folder of a model.")],
    data: Annotated[Path, Option(help="A .jsonl, .json, .csv or text file, or pictures.")],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.")],
    *,
    preview: Annotated[
        bool, Option("--preview", help="Show three examples and what is learned; train nothing.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Show nothing on the way.")] = False,
) -> None:
    """Fine-tune a language, text or vision model; write adapters and a model to serve."""
    options = FineTuneOptions(**option_values, progress=not quiet)
    tuning = FineTuneRun(model, data, options)
    if preview:
        typer.echo(f"data: {tuning.task.summary()}")
        for note in tuning.task.notes:
            typer.echo(f"note: {note}")
        typer.echo(f"\n{tuning.task.preview()}")
        return
    tuning.run(output)


federate = typer.Typer(
    help="Train artifacts on many machines with Flower, browser tabs among them.",
    no_args_is_help=True,
)


@federate.command()
def init(
    directory: Annotated[Path, Argument(help="The new project.")],
    artifacts: Annotated[Path, Option(help="A directory that `onnxtrain build` has made.")],
    data: Annotated[
        Path | None, Option(help="An .npz file, for clients that have none of their own.")
    ] = None,
    clients: Annotated[int, Option(help="How many have to be there for a round.")] = 2,
    rounds: Annotated[int, Option(help="How many rounds.")] = 10,
) -> None:
    """Write a project that `flwr run` takes, in a simulation or with machines of their own."""
    for path in write_project(directory, artifacts, data, clients=clients, rounds=rounds):
        typer.echo(path)


@federate.command()
def serve(
    page: Annotated[Path | None, Option(help="A folder with the page to serve.")] = None,
    artifacts: Annotated[
        Path | None, Option(help="Artifacts that the page trains, served as /artifacts.")
    ] = None,
    folder: Annotated[
        list[str] | None, Option(help="Further folders to serve: /data=path; repeatable.")
    ] = None,
    port: Annotated[int, Option(help="Where pages are.")] = 8080,
    host: Annotated[str, Option(help="Which interface pages are served on.")] = "127.0.0.1",
    superlink_port: Annotated[int, Option(help="Of the SuperLink, for Python clients.")] = 8000,
    superlink_address: Annotated[
        str, Option(help="Of a SuperLink that runs already; none is started then.")
    ] = "",
    database: Annotated[
        Path | None, Option(help="Where the SuperLink remembers nodes when it is started again.")
    ] = None,
    origin: Annotated[
        list[str] | None, Option(help="Of pages that others serve; repeatable.")
    ] = None,
    certificate: Annotated[
        Path | None, Option(help="A .pem file: pages elsewhere than on localhost need HTTPS.")
    ] = None,
    key: Annotated[Path | None, Option(help="Of the certificate.")] = None,
) -> None:
    """Start a SuperLink, and a server through which pages reach it."""
    given = {"/artifacts": artifacts, "/": page, **dict(map(_parse_served_folder, folder or ()))}
    folders = {path: place for path, place in given.items() if place}
    for place in folders.values():
        if not place.is_dir():
            raise OnnxTrainError(f"{place}: no such folder")

    def pages(address: str) -> None:
        scheme = "https" if certificate else "http"
        typer.echo(f"SuperLink {address}, pages {scheme}://{host}:{port}")
        serve_pages(
            address,
            host=host,
            port=port,
            folders=folders,
            origins=origin or (),
            certificate=certificate,
            key=key,
        )

    if superlink_address:
        pages(superlink_address)
    else:
        with superlink(superlink_port, database=database) as address:
            pages(address)


def _parse_served_folder(text: str) -> tuple[str, Path]:
    """Return path and folder of ``/data=path``."""
    path, equals, place = text.partition("=")
    if not equals or not path.startswith("/"):
        raise OnnxTrainError(f"not a folder to serve: {text!r}\nhint: --folder /data=runs/data")
    return path, Path(place)
