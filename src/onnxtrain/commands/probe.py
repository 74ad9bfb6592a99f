"""``onnxtrain probe pack | run | profile``: what a runtime really does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from onnxtrain.errors import ProbeError
from onnxtrain.graph.io.atomic import write_text
from onnxtrain.lowering.api import find_profile
from onnxtrain.lowering.probe.bundle import make_bundle
from onnxtrain.lowering.probe.run import run_pack
from onnxtrain.lowering.probe.table import profile_of, read_results, text_of

probe = typer.Typer(
    help="Record what a runtime really does with single nodes, and make a profile of it.",
    no_args_is_help=True,
)
_Pack = Annotated[Path, Argument(help="The folder of a pack.")]


@probe.command()
def pack(
    folder: _Pack,
    opset: Annotated[
        list[int] | None, Option(help="To spell nodes for; repeatable. Default: 7 to 26.")
    ] = None,
) -> None:
    """Write a pack of single-node models, with runners for Python, Node and browsers."""
    listing = make_bundle(folder, opset or ())
    operators = {n["op"] for n in listing["nodes"]}
    typer.echo(f"{folder}: {len(listing['nodes'])} nodes of {len(operators)} operators")


@probe.command()
def run(
    folder: _Pack,
    runtime: Annotated[str, Option(help="onnxruntime, tract or opencv.")],
    output: Annotated[Path, Option("--output", "-o", help="The results, a .json file.")],
    provider: Annotated[
        str, Option(help="Of onnxruntime: a node that it leaves to the CPU counts as refused.")
    ] = "",
    python: Annotated[
        str, Option(help="The Python that has the runtime; this one by default.")
    ] = sys.executable,
) -> None:
    """Run a pack in a runtime of Python; see the pack's probe.mjs and probe.html for others."""
    typer.echo(run_pack(folder, runtime, output, provider=provider, python=python))


@probe.command()
def profile(
    results: Annotated[Path, Argument(help="What a runner has written.")],
    output: Annotated[Path, Option("--output", "-o", help="The profile, a .json file.")],
    base: Annotated[
        str | None, Option(help="A profile, for what the pack does not tell: control flow, ...")
    ] = None,
    name: Annotated[str | None, Option(help="Of the profile; the file's by default.")] = None,
) -> None:
    """Make a profile of what a runner has found."""
    known = None
    if base is not None:
        known = find_profile(base)
        if known is None:
            raise ProbeError(f"{base}: a plain opset is no base\nhint: onnxtrain profiles")
    probed = profile_of(read_results(results), name or output.stem, known)
    write_text(output, text_of(probed))
    versions = sum(len(entry.get("since", ())) for entry in probed["ops"].values())
    typer.echo(f"{output}: {len(probed['ops'])} operators, {versions} versions")
