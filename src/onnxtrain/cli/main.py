"""The ``onnxtrain`` command: the app, --version, --debug and error output."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

import onnxtrain
from onnxtrain.cli import register
from onnxtrain.errors import OnnxTrainError

app = typer.Typer(
    help="Differentiate, train and fine-tune ONNX models with ONNX Runtime.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

register(app)


def main() -> None:
    """Run the command line; print errors without a traceback and exit with code 1."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(args=arguments, standalone_mode=True)
    except OnnxTrainError as error:
        if debug:
            raise
        Console(stderr=True, highlight=False).print(
            f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True
        )
        sys.exit(1)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(onnxtrain.__version__)
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
]


@app.callback()
def _options(
    version: _Version = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    del version, debug  # The callback prints the version; main() reads --debug at any position.
