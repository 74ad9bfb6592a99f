"""The command line: ``onnxtrain explain | gradients | ops | build | train | eval | export``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import onnxtrain
from onnxtrain.autodiff.coverage import operators
from onnxtrain.autodiff.explain import explain as explain_model
from onnxtrain.commands import register
from onnxtrain.commands.common import read_size
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io import save

app = typer.Typer(
    help="Differentiate and train ONNX models in standard operators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

register(app)

_Model = Annotated[Path, typer.Argument(help="An .onnx file.")]
_Wrt = Annotated[
    list[str] | None,
    typer.Option("--wrt", help="Name or glob of an initializer or input; repeatable."),
]
_Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Run the command line; errors are one readable block and exit code 1."""
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(onnxtrain.__version__)
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


@app.callback()
def _options(
    version: _Version = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    del version, debug  # one is printed by its callback, the other read in main


@app.command()
def explain(
    model: _Model,
    wrt: _Wrt = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="A size for the estimate of memory: batch=32.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show for each node whether and how it is differentiated, and what training would take."""
    report = explain_model(model, wrt or None, dims=dict(read_size(d) for d in dim or ()))
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))


@app.command()
def gradients(
    model: _Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model.")],
    wrt: _Wrt = None,
    of: Annotated[
        str | None, typer.Option(help="A scalar output; else a vjp of all outputs.")
    ] = None,
    target: Annotated[str, typer.Option(help="cpu, cuda, wasm, webgpu or portable.")] = "cpu",
) -> None:
    """Write a model that computes gradients: of one scalar output, or vector-Jacobian products."""
    if of is not None:
        result = onnxtrain.grad(model, wrt or None, of, target=target)
    else:
        result = onnxtrain.vjp(model, wrt or None, target=target)
    save(result, output)
    graph = result.graph
    sizes = f"{len(graph.node)} nodes, {len(graph.input)} inputs, {len(graph.output)} outputs"
    typer.echo(f"{output}: {sizes}")


@app.command()
def ops(
    missing: Annotated[
        bool, typer.Option("--missing", help="Only those we cannot handle.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """List the operators of the ONNX standard and how each is differentiated."""
    listed = [o for o in operators() if o.how == "missing" or not missing]
    if as_json:
        typer.echo(
            json.dumps(
                [{"name": o.name, "since": o.since, "how": o.how, "why": o.why} for o in listed],
                indent=2,
            )
        )
        return
    if not listed:
        return
    table = Table("operator", "since", "how", "why")
    for o in listed:
        table.add_row(o.name, str(o.since), o.how, o.why)
    Console().print(table)
