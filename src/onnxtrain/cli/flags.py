"""Arguments that several commands share, and flags generated from option dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from onnxtrain.errors import PrepareError
from onnxtrain.options import Flag, flags

Model = Annotated[Path, typer.Argument(help="Path of the .onnx file.")]
Wrt = Annotated[
    list[str] | None,
    typer.Option(
        "--wrt", help="Initializers or inputs to differentiate for: name or glob; repeatable."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Directory = Annotated[
    Path, typer.Argument(help="Directory of artifacts, written by `onnxtrain build`.")
]
Data = Annotated[
    Path,
    typer.Option(help="An .npz, .csv, .tsv or .jsonl file, or a folder of images per class."),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Checkpoint to load. Default: the weights in the directory.")
]
Device = Annotated[
    str, typer.Option(help="Device: cpu, cuda, cuda:N ...; `onnxtrain devices` lists all.")
]
Threads = Annotated[int | None, typer.Option(help="Number of CPU threads. Default: all cores.")]


def read_size(text: str) -> tuple[str, int]:
    """Parse a size such as ``batch=32``."""
    name, equals, value = text.partition("=")
    if not equals or not value.isdecimal():
        raise PrepareError(f"invalid size {text!r} (expected NAME=NUMBER)\nhint: --dim batch=32")
    return name, int(value)


def read_dim(text: str) -> tuple[str, int | str]:
    """Parse a size to fix, such as ``batch=32``, or to free, such as ``image[0]=batch``."""
    name, _, value = text.partition("=")
    return (name, value) if value.isidentifier() else read_size(text)


OptionValues = dict[str, Any]
"""Values of the options that are present on the command line, by name."""
Command = Callable[..., None]


def flags_from(options: type) -> Callable[[Command], Command]:
    """Return a decorator that adds a flag to a command for each field of an option dataclass.

    The command gets the values as its first argument, of type :data:`OptionValues`. In the help
    text the flags come after the command's own parameters, but before keyword-only ones.
    """

    def decorate(command: Command) -> Command:
        declared = flags(options)
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(flag.name or name) for name, flag in declared.items()}
            command({n: v for n, v in values.items() if v not in (None, [])}, **arguments)

        first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in (*first, *(_flag_parameter(flag) for flag in declared.values()), *last)
        ]
        # typer reads the signature and the annotations of the function.
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _flag_parameter(flag: Flag) -> inspect.Parameter:
    assert flag.name is not None
    # An explicit name stops typer from adding --no-NAME to a switch.
    names = [f"--{flag.name.replace('_', '-')}"] if flag.kind is bool else []
    kind = flag.kind if flag.default is not None else flag.kind | None
    required = flag.default is dataclasses.MISSING
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else flag.default,
        annotation=Annotated[kind, Option(*names, help=flag.help)],
    )
