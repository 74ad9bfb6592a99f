"""``onnxtrain federate init | serve``: a federation of Flower over artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from onnxtrain.errors import OnnxTrainError
from onnxtrain.federation.project import write_project
from onnxtrain.federation.serve import serve as serve_pages
from onnxtrain.federation.serve import superlink

federate = typer.Typer(
    help="Train artifacts on many machines with Flower, browser tabs among them.",
    no_args_is_help=True,
)


@federate.command()
def init(
    directory: Annotated[Path, Argument(help="The new project.")],
    artifacts: Annotated[Path, Option(help="A directory that `onnxtrain build` has made.")],
    data: Annotated[
        Path | None, Option(help="An .npz file, for clients that have none of their own.")
    ] = None,
    clients: Annotated[int, Option(help="How many have to be there for a round.")] = 2,
    rounds: Annotated[int, Option(help="How many rounds.")] = 10,
) -> None:
    """Write a project that `flwr run` takes, in a simulation or with machines of their own."""
    for path in write_project(directory, artifacts, data, clients=clients, rounds=rounds):
        typer.echo(path)


@federate.command()
def serve(
    page: Annotated[Path | None, Option(help="A folder with the page to serve.")] = None,
    artifacts: Annotated[
        Path | None, Option(help="Artifacts that the page trains, served as /artifacts.")
    ] = None,
    folder: Annotated[
        list[str] | None, Option(help="Further folders to serve: /data=path; repeatable.")
    ] = None,
    port: Annotated[int, Option(help="Where pages are.")] = 8080,
    host: Annotated[str, Option(help="Which interface pages are served on.")] = "127.0.0.1",
    superlink_port: Annotated[int, Option(help="Of the SuperLink, for Python clients.")] = 8000,
    superlink_address: Annotated[
        str, Option(help="Of a SuperLink that runs already; none is started then.")
    ] = "",
    database: Annotated[
        Path | None, Option(help="Where the SuperLink remembers nodes when it is started again.")
    ] = None,
    origin: Annotated[
        list[str] | None, Option(help="Of pages that others serve; repeatable.")
    ] = None,
    certificate: Annotated[
        Path | None, Option(help="A .pem file: pages elsewhere than on localhost need HTTPS.")
    ] = None,
    key: Annotated[Path | None, Option(help="Of the certificate.")] = None,
) -> None:
    """Start a SuperLink, and a server through which pages reach it."""
    given = {"/artifacts": artifacts, "/": page, **dict(map(_served, folder or ()))}
    folders = {path: place for path, place in given.items() if place}
    for place in folders.values():
        if not place.is_dir():
            raise OnnxTrainError(f"{place}: no such folder")

    def pages(address: str) -> None:
        scheme = "https" if certificate else "http"
        typer.echo(f"SuperLink {address}, pages {scheme}://{host}:{port}")
        serve_pages(
            address,
            host=host,
            port=port,
            folders=folders,
            origins=origin or (),
            certificate=certificate,
            key=key,
        )

    if superlink_address:
        pages(superlink_address)
    else:
        with superlink(superlink_port, database=database) as address:
            pages(address)


def _served(text: str) -> tuple[str, Path]:
    """Return path and folder of ``/data=path``."""
    path, equals, place = text.partition("=")
    if not equals or not path.startswith("/"):
        raise OnnxTrainError(f"not a folder to serve: {text!r}\nhint: --folder /data=runs/data")
    return path, Path(place)
