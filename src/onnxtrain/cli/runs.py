"""Commands for training: train, eval, profile, export, lr-find, example, finetune and federate."""

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

from onnxtrain.artifacts.directory import RUN
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
)
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model
from onnxtrain.federation.project import write_project
from onnxtrain.federation.serve import serve as serve_pages
from onnxtrain.federation.serve import superlink
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.finetune import FineTuneRun
from onnxtrain.graph.io.writer import as_save_error, write_text
from onnxtrain.training import Trainer, find_lr, read_data
from onnxtrain.training.checks import check_initial_weights
from onnxtrain.training.distributed import restarts
from onnxtrain.training.fit import BEST, CHECKPOINTS, CheckpointRotation, FitOptions
from onnxtrain.training.profiler import random_batch


@flags_from(FitOptions)
def train(
    option_values: OptionValues,
    directory: Directory,
    data: Data,
    *,
    seed: Annotated[int, Option(help="Random seed for dropout and shuffling.")] = 0,
    quiet: Annotated[bool, Option("--quiet", help="Do not show progress.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train artifacts and save the trained weights in their directory."""
    trainer = Trainer(directory, device=device, seed=seed, threads=threads, distributed="auto")
    option_values = {"directory": directory / RUN, "progress": not quiet, **option_values}
    if restarts():  # torchrun has started the workers again
        option_values["resume"] = True
    elif option_values.get("resume"):
        last = CheckpointRotation(option_values["directory"] / CHECKPOINTS).newest()
        if last is None:
            raise OnnxTrainError(
                f"{option_values['directory']}: no checkpoint to resume from\n"
                "hint: remove --resume, or pass the run's directory: --out DIRECTORY"
            )
    history = trainer.fit(data, **option_values)
    trainer.save(directory / trainer.manifest.checkpoint)
    reason = f" ({history.stopped})" if history.stopped else ""
    if trainer.workers is None or trainer.workers.main:
        typer.echo(f"{directory}: trained to step {trainer.global_step}{reason}")


def evaluate(
    directory: Directory,
    data: Data,
    metric: Annotated[
        list[str] | None, Option(help="Metric besides those of the build: f1, auc, top_3 ...")
    ] = None,
    checkpoint: Checkpoint = None,
    batch_size: Annotated[
        int | None, Option(help="Batch size. Default: 256, or the model's fixed batch size.")
    ] = None,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Evaluate artifacts on data: print loss and metrics."""
    trainer = Trainer(directory, device=device, threads=threads)
    if checkpoint is not None:
        trainer.load(checkpoint)
    evaluation = trainer.evaluate(data, batch_size=batch_size, metrics=metric or ())
    if as_json:
        typer.echo(json.dumps({**evaluation.to_dict(), "samples": evaluation.samples}))
        return
    for name, value in evaluation.to_dict().items():
        if isinstance(value, list):
            typer.echo(f"{name}\n{np.array(value)}")
        else:
            typer.echo(f"{name} {value:.6g}")


def profile(
    directory: Directory,
    data: Annotated[
        Path | None, Option(help="Data, as for train. Default: random inputs.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, Option(help="Batch size. Default: 32, or the model's fixed batch size.")
    ] = None,
    dim: Annotated[
        list[str] | None,
        Option(help="Value of a symbolic size of random inputs: length=128; repeatable."),
    ] = None,
    steps: Annotated[int, Option(help="Number of steps to average over.")] = 10,
    layout: Annotated[
        str, Option(help="Layout of the step models: auto, fused, separate or vector.")
    ] = "auto",
    trace: Annotated[
        Path | None, Option(help="Chrome trace to write, for Perfetto or chrome://tracing.")
    ] = None,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Profile training steps by operator and module, without changing the artifacts."""
    trainer = Trainer(directory, device=device, threads=threads, layout=layout)
    if data is None:
        sizes = dict(read_size(d) for d in dim or ())
        batch = random_batch(trainer.batch_specs, sizes, batch_size)
    else:
        rows = batch_size or trainer.fixed_batch or 32
        arrays = read_data(data, trainer.batch_specs, trainer.classes).arrays
        batch = {n: a[:rows] for n, a in arrays.items()}
    report = trainer.profile(batch, steps=steps, trace=trace)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        Console().print(report, highlight=False)


def export(
    directory: Directory,
    output: Annotated[Path, Option("--output", "-o", help="Output .onnx file.")],
    checkpoint: Checkpoint = None,
    best: Annotated[
        bool, Option("--best", help="Export the best epoch of the run in DIRECTORY/run.")
    ] = False,
    ema: Annotated[bool, Option("--ema", help="Export the moving average of the weights.")] = False,
    fold: Annotated[
        bool, Option("--fold", help="Fold nodes that depend on weights only into constants.")
    ] = False,
    opset: Annotated[
        int | None, Option(help="Opset of the file. Default: that of the model.")
    ] = None,
    training_info: Annotated[
        bool,
        Option("--training-info", help="Include the training step, as the ONNX standard has it."),
    ] = False,
) -> None:
    """Export the inference model with the trained weights."""
    trainer = Trainer(directory)
    if best:
        if checkpoint is not None:
            raise OnnxTrainError(
                "--best and --checkpoint both select weights\nhint: pass only one of them"
            )
        checkpoint = directory / RUN / CHECKPOINTS / BEST
        if not checkpoint.exists():
            raise OnnxTrainError(
                f"{checkpoint}: no best checkpoint\n"
                f"hint: for a run with --out OUT: --checkpoint OUT/checkpoints/{BEST}"
            )
    if checkpoint is not None:
        loaded = trainer.read(checkpoint)
        if best:
            check_initial_weights(loaded.meta, trainer.artifacts, str(checkpoint))
        trainer.restore(loaded)
    trainer.export(output, ema=ema, fold=fold, opset=opset, training_info=training_info)
    typer.echo(f"{output}: {output.stat().st_size:,} bytes")


def lr_find(
    directory: Directory,
    data: Data,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Output .png or .svg file for the plot.")
    ] = None,
    batch_size: Annotated[
        int | None, Option(help="Batch size. Default: 32, or the model's fixed batch size.")
    ] = None,
    lowest: Annotated[float, Option(help="Lowest learning rate to try.")] = 1e-6,
    highest: Annotated[
        float, Option(help="Highest learning rate to try; stops early if the loss diverges.")
    ] = 1.0,
    steps: Annotated[int, Option(help="Number of batches.")] = 100,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Suggest a learning rate: increase it step by step and find where the loss falls fastest."""
    trainer = Trainer(directory, device=device, threads=threads)
    curve = find_lr(
        trainer,
        data,
        batch_size=batch_size,
        lowest=lowest,
        highest=highest,
        steps=steps,
    )
    if output is not None:
        curve.save(output)
    if as_json:
        result = {"lrs": curve.lrs, "losses": curve.losses, "suggestion": curve.suggestion}
        typer.echo(json.dumps(result))
        return
    typer.echo(f"learning rate {curve.suggestion:.2g}")
    typer.echo(f"next: onnxtrain train {directory} --data {data} --lr {curve.suggestion:.2g}")


def example(
    folder: Annotated[
        Path, typer.Argument(help="Output folder; created if it does not exist.")
    ] = Path(),
) -> None:
    """Write an example model and data: model.onnx, train.npz, test.npz and train.csv."""
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
    model: Annotated[Path, Argument(help="Path of an .onnx file, or folder of a model.")],
    data: Annotated[
        Path, Option(help="A .jsonl, .json, .csv or text file, or a folder of images per class.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Output folder.")],
    *,
    preview: Annotated[
        bool, Option("--preview", help="Print three examples with their masks and exit.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Do not show progress.")] = False,
) -> None:
    """Fine-tune a language, text or vision model; write adapters and a merged model."""
    options = FineTuneOptions(**option_values, progress=not quiet)
    run = FineTuneRun(model, data, options)
    if preview:
        typer.echo(f"data: {run.task.summary()}")
        for note in run.task.notes:
            typer.echo(f"note: {note}")
        typer.echo(f"\n{run.task.preview()}")
        return
    run.run(output)


federate = typer.Typer(
    help="Federated training with Flower, on machines and in browser tabs.",
    no_args_is_help=True,
)


@federate.command()
def init(
    directory: Annotated[Path, Argument(help="Directory of the new project.")],
    artifacts: Annotated[
        Path, Option(help="Directory of artifacts, written by `onnxtrain build`.")
    ],
    data: Annotated[
        Path | None, Option(help="An .npz file for clients without their own data.")
    ] = None,
    clients: Annotated[int, Option(help="Minimum number of clients per round.")] = 2,
    rounds: Annotated[int, Option(help="Number of rounds.")] = 10,
) -> None:
    """Write a Flower project for `flwr run`, as a simulation or on several machines."""
    for path in write_project(directory, artifacts, data, clients=clients, rounds=rounds):
        typer.echo(path)


@federate.command()
def serve(
    page: Annotated[Path | None, Option(help="Folder of the web page to serve.")] = None,
    artifacts: Annotated[
        Path | None, Option(help="Artifacts that the page trains, served as /artifacts.")
    ] = None,
    folder: Annotated[
        list[str] | None, Option(help="Additional folder to serve: /data=path; repeatable.")
    ] = None,
    port: Annotated[int, Option(help="Port of the web server.")] = 8080,
    host: Annotated[str, Option(help="Host of the web server.")] = "127.0.0.1",
    superlink_port: Annotated[
        int, Option(help="Port of the SuperLink, for Python clients.")
    ] = 8000,
    superlink_address: Annotated[
        str, Option(help="Address of a running SuperLink. Default: start one.")
    ] = "",
    database: Annotated[
        Path | None, Option(help="File where the SuperLink stores its nodes between runs.")
    ] = None,
    origin: Annotated[
        list[str] | None,
        Option(help="Allowed origin of pages on other servers (CORS); repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(help="Name of this server that clients use, if without a certificate; repeatable."),
    ] = None,
    certificate: Annotated[
        Path | None, Option(help="TLS certificate (.pem); required outside localhost.")
    ] = None,
    key: Annotated[Path | None, Option(help="Private key of the certificate.")] = None,
) -> None:
    """Start a SuperLink and a web server that connects browser clients to it."""
    folders = dict(map(_parse_served_folder, folder or ()))
    if page is not None:
        folders["/"] = page
    for path in (*folders.values(), *([artifacts] if artifacts else ())):
        if not path.is_dir():
            raise OnnxTrainError(f"{path}: no such folder")

    def pages(address: str) -> None:
        scheme = "https" if certificate else "http"
        typer.echo(f"SuperLink {address}, pages {scheme}://{host}:{port}")
        serve_pages(
            address,
            host=host,
            port=port,
            folders=folders,
            artifacts=artifacts,
            origins=origin or (),
            hosts=allow_host or (),
            certificate=certificate,
            key=key,
        )

    if superlink_address:
        pages(superlink_address)
    else:
        with superlink(superlink_port, database=database) as address:
            pages(address)


def _parse_served_folder(text: str) -> tuple[str, Path]:
    """Return URL path and folder of ``/data=path``."""
    url, equals, path = text.partition("=")
    if not equals or not url.startswith("/"):
        raise OnnxTrainError(
            f"invalid folder {text!r} (expected /URL=PATH)\nhint: --folder /data=runs/data"
        )
    return url, Path(path)
