"""The commands of the command line, a file for each."""

import typer

from onnxtrain.commands.build import build
from onnxtrain.commands.evaluate import evaluate
from onnxtrain.commands.example import example
from onnxtrain.commands.explain import explain
from onnxtrain.commands.export import export
from onnxtrain.commands.federate import federate
from onnxtrain.commands.finetune import finetune
from onnxtrain.commands.grad import grad
from onnxtrain.commands.lowering import check, lower, profiles
from onnxtrain.commands.lr_find import lr_find
from onnxtrain.commands.ops import ops
from onnxtrain.commands.plan import plan
from onnxtrain.commands.probe import probe
from onnxtrain.commands.train import train


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("explain")(explain)
    app.command("plan")(plan)
    app.command("grad")(grad)
    app.command("gradients", hidden=True)(grad)
    app.command("ops")(ops)
    app.command("build")(build)
    app.command("lr-find")(lr_find)
    app.command("train")(train)
    app.command("finetune")(finetune)
    app.command("eval")(evaluate)
    app.command("export")(export)
    app.command("lower")(lower)
    app.command("check")(check)
    app.command("profiles")(profiles)
    app.add_typer(probe, name="probe")
    app.add_typer(federate, name="federate")
    app.command("example")(example)
