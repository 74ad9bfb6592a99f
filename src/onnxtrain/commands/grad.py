"""``onnxtrain grad``: a model that computes gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from onnxtrain.autodiff.gradients import grad as gradients_of_output
from onnxtrain.autodiff.gradients import vjp
from onnxtrain.commands.common import Model, Wrt
from onnxtrain.graph.io import save
from onnxtrain.targets import TARGETS


def grad(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="Where to write the model.")],
    wrt: Wrt = None,
    of: Annotated[str | None, Option(help="A scalar output; else a vjp of all outputs.")] = None,
    target: Annotated[str, Option(help=f"One of {', '.join(TARGETS)}.")] = "cpu",
) -> None:
    """Write a model that computes gradients: of one scalar output, or vector-Jacobian products."""
    if of is not None:
        result = gradients_of_output(model, wrt or None, of, target=target)
    else:
        result = vjp(model, wrt or None, target=target)
    save(result, output)
    graph = result.graph
    sizes = f"{len(graph.node)} nodes, {len(graph.input)} inputs, {len(graph.output)} outputs"
    typer.echo(f"{output}: {sizes}")
