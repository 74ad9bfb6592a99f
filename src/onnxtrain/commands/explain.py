"""``onnxtrain explain``: how each node is differentiated."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Option

from onnxtrain.autodiff.explain import explain as explain_model
from onnxtrain.commands.common import Json, Model, Wrt, read_size


def explain(
    model: Model,
    wrt: Wrt = None,
    dim: Annotated[
        list[str] | None, Option(help="Fix a size: batch=32, or by place: x[0]=1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show for each node whether and how it is differentiated, and what training would take."""
    report = explain_model(model, wrt or None, dims=dict(read_size(d) for d in dim or ()))
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
