"""What several commands take.

Commands whose flags are made of declared options.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from onnxtrain.errors import PrepareError
from onnxtrain.options import Flag, flags
from onnxtrain.training import Trainer
from onnxtrain.training.data_files import read_data

Model = Annotated[Path, typer.Argument(help="An .onnx file.")]
Wrt = Annotated[
    list[str] | None,
    typer.Option("--wrt", help="Name or glob of an initializer or input; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Directory = Annotated[Path, typer.Argument(help="A directory that `onnxtrain build` has made.")]
Data = Annotated[
    Path,
    typer.Option(
        help="An .npz, .csv or .jsonl file, or a folder with a folder of pictures per class."
    ),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights to take; else those in the directory.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores by default.")]
_CLASSES = "classes:"


def read_size(text: str) -> tuple[str, int]:
    """Return name and number of ``batch=32``."""
    name, equals, value = text.partition("=")
    if not equals or not value.isdecimal():
        raise PrepareError(f"not a size: {text!r}\nhint: --dim batch=32")
    return name, int(value)


def read_trainer_data(trainer: Trainer, path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file or folder for a trainer.

    Where labels are texts, or folders of pictures, the trainer's checkpoints keep which number
    stands for which: it is the same for training, validation and all later evaluation.
    """
    kept = {
        name.removeprefix(_CLASSES): json.loads(str(texts))
        for name, texts in trainer.properties.items()
        if name.startswith(_CLASSES)
    }
    data = read_data(path, trainer.batch_specs, kept)
    for name, texts in data.classes.items():
        trainer.properties[_CLASSES + name] = json.dumps(texts)
    return data.arrays


OptionValues = dict[str, Any]
"""The options that were given, by name; those left out are not in it."""
Command = Callable[..., None]


def flags_from(declared: type) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the flags of a dataclass of options.

    The command gets their values as its first argument, of type :data:`Asked`. Its own parameters
    come before the flags in the help text, or behind them if they are keyword-only.
    """

    def decorate(command: Command) -> Command:
        known = flags(declared)
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(flag.name or name) for name, flag in known.items()}
            command({n: v for n, v in values.items() if v not in (None, [])}, **given)

        first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in (*first, *(_flag_parameter(flag) for flag in known.values()), *last)
        ]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _flag_parameter(flag: Flag) -> inspect.Parameter:
    assert flag.name is not None
    # A switch has one name; of others, typer makes it.
    names = [f"--{flag.name.replace('_', '-')}"] if flag.kind is bool else []
    kind = flag.kind if flag.default is not None else flag.kind | None
    required = flag.default is dataclasses.MISSING
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else flag.default,
        annotation=Annotated[kind, Option(*names, help=flag.help)],
    )
