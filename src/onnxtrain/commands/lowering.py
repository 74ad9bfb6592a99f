"""``onnxtrain lower | check | profiles``: models for older opsets and smaller runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from onnxtrain.commands.common import Json, Model, read_size
from onnxtrain.errors import LoweringError
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.atomic import write_text
from onnxtrain.lowering import profile as profiles_of
from onnxtrain.lowering.api import compared_on, find_profile
from onnxtrain.lowering.api import lower as lower_model
from onnxtrain.lowering.check import problems
from onnxtrain.lowering.reduced_ops import write_config

_Profile = Annotated[
    str | None,
    Option(help="A runtime that `onnxtrain profiles` lists, or a profile or operator list file."),
]


def lower(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="The .onnx file to write.")],
    profile: _Profile = None,
    opset: Annotated[int | None, Option(help="Of the result, 7 to 26.")] = None,
    dim: Annotated[
        list[str] | None, Option(help="A number for a symbolic size: batch=1; repeatable.")
    ] = None,
    verify: Annotated[
        bool, Option(help="Compare with the original on random inputs before writing.")
    ] = True,
    config: Annotated[
        Path | None, Option(help="Also write the operator list of a reduced onnxruntime.")
    ] = None,
) -> None:
    """Write the model for an older opset or a smaller runtime."""
    sizes = dict(read_size(d) for d in dim or [])
    result = lower_model(model, profile, opset=opset, dims=sizes, verify=verify)
    save(result, output)
    if config is not None:
        write_text(config, write_config(load(result)))
    runtime = compared_on(result)
    verified = "not compared with the original"
    if runtime is not None:
        verified = f"compared with the original on {runtime}"
    version = result.opset_import[0].version
    typer.echo(f"{output}: opset {version}, {len(result.graph.node)} nodes, {verified}")


def check(
    model: Model,
    profile: Annotated[str, Option(help="A runtime that `onnxtrain profiles` lists, or a file.")],
    as_json: Json = False,
) -> None:
    """List the nodes that a runtime would not run, and why; exit code 1 if there are any."""
    chosen = find_profile(profile)
    if chosen is None:
        raise LoweringError("a plain opset is no runtime to check for\nhint: onnxtrain profiles")
    obstacles = problems(load(model), chosen)
    if as_json:
        rows = [{"node": p.node, "what": p.what, "why": p.why} for p in obstacles]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for problem in obstacles:
            typer.echo(str(problem))
        typer.echo(
            f"{chosen.name}: {len(obstacles)} problem(s)" if obstacles else f"{chosen.name}: runs"
        )
    if obstacles:
        raise typer.Exit(1)


def profiles(as_json: Json = False) -> None:
    """List the runtimes that models can be lowered to."""
    runtimes = [profiles_of.find(name) for name in profiles_of.names()]
    if as_json:
        rows = [
            {
                "name": p.name,
                "version": p.version,
                "opset": p.opset,
                "operators": len(p.ops),
                "source": p.source,
                "probed": p.probed,
            }
            for p in runtimes
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("profile", "version", "opsets", "lowered to", "operators")
    for p in runtimes:
        low, high = p.opset
        table.add_row(p.name, p.version, f"{low}-{high}", str(p.prefer), str(len(p.ops)))
    Console().print(table)
    typer.echo("and opset-7 to opset-26: all operators of that opset")
