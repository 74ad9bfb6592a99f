"""``onnxtrain finetune``: a model's own file, fine-tuned on texts or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from onnxtrain.commands.from_options import Asked, with_flags_of
from onnxtrain.finetuning.finetune import FineTuning
from onnxtrain.finetuning.options import FineTuneOptions


@with_flags_of(FineTuneOptions)
def finetune(
    asked: Asked,
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
    options = FineTuneOptions(**asked, progress=not quiet)
    tuning = FineTuning(model, data, options)
    if preview:
        typer.echo(f"data: {tuning.task.summary()}")
        for note in tuning.task.notes:
            typer.echo(f"note: {note}")
        typer.echo(f"\n{tuning.task.preview()}")
        return
    tuning.run(output)
