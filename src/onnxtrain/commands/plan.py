"""``onnxtrain plan``: the memory of a training run before it starts."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Argument, Option

from onnxtrain.commands.common import Json, read_size
from onnxtrain.planning import plan as plan_run


def plan(
    model: Annotated[str, Argument(help="An .onnx file, or a directory that `build` has made.")],
    memory: Annotated[str | None, Option(help="A budget: 2GB, 512MiB.")] = None,
    tokens: Annotated[str | None, Option(help="Sequences and their length: 4x512.")] = None,
    batch: Annotated[int | None, Option(help="The size of the batch.")] = None,
    size: Annotated[list[str] | None, Option(help="A symbolic size: height=224.")] = None,
    loss: Annotated[str | None, Option(help="As for build; found by itself if not given.")] = None,
    optimizer: Annotated[str, Option(help="As for build.")] = "adamw",
    recompute: Annotated[list[str] | None, Option(help="As for build: auto, or names.")] = None,
    as_json: Json = False,
) -> None:
    """Predict the peak of memory of training on the CPU, and tell what would fit a budget."""
    again = recompute or []
    report = plan_run(
        model,
        loss=loss,
        optimizer=optimizer,
        memory=memory,
        tokens=tokens,
        batch=batch,
        sizes=dict(read_size(s) for s in size or ()),
        recompute="auto" if again == ["auto"] else again,
    )
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    report.check()
