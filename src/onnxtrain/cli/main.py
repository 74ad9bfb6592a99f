"""The ``onnxtrain`` command: the app, --version, --debug and error output."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import onnxtrain
from onnxtrain.cli import register
from onnxtrain.errors import OnnxTrainError, hints_name_flags

_INTERRUPTED = 128 + 2  # the shell's exit code of a program that SIGINT ended
_SYNONYMS = {
    "--learning-rate": "--lr",
    "--bs": "--batch-size",
    "--val": "--validation",
    "--valid": "--validation",
    "--val-data": "--validation",
    "--early-stopping": "--patience",
    "--metrics": "--metric",
    "--scheduler": "--schedule",
}
"""Names of flags in other programs."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command: its hints name flags, and Ctrl-C ends it with a message."""
        try:
            with hints_name_flags():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            _print_error(str(interrupt) or "interrupted")
            raise typer.Exit(_INTERRUPTED) from interrupt
        except Exception as error:
            # An unknown option lists similar names, but the names may have no letter in common.
            known = _SYNONYMS.get(getattr(error, "option_name", None) or "")
            command = getattr(getattr(error, "ctx", None), "command", None)
            flags = {flag for p in getattr(command, "params", ()) for flag in p.opts}
            if known in flags:
                error.possibilities = [known]  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=_Commands,
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
        _print_error(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _print_error(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, style="red", markup=False, soft_wrap=True)


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
