"""Commands about artifacts and training, one file each."""

import typer

from onnxtrain.commands.build import build
from onnxtrain.commands.evaluate import evaluate
from onnxtrain.commands.export import export
from onnxtrain.commands.lowering import check, lower, profiles
from onnxtrain.commands.probe import probe
from onnxtrain.commands.train import train


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("build")(build)
    app.command("train")(train)
    app.command("eval")(evaluate)
    app.command("export")(export)
    app.command("lower")(lower)
    app.command("check")(check)
    app.command("profiles")(profiles)
    app.add_typer(probe, name="probe")
