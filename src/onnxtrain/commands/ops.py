"""``onnxtrain ops``: the operators of the standard, and of onnxruntime's own domain."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from onnxtrain.autodiff.coverage import operators
from onnxtrain.commands.common import Json


def ops(
    domain: Annotated[str, Option(help="ai.onnx, or com.microsoft: onnxruntime's own.")] = "",
    missing: Annotated[bool, Option("--missing", help="Only those we cannot handle.")] = False,
    as_json: Json = False,
) -> None:
    """List the operators of the ONNX standard, or of a domain, and how each is differentiated."""
    listed = [o for o in operators(domain) if o.how == "missing" or not missing]
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
