"""The command line: ``register`` adds all commands to the app.

main.py    the app, tracebacks and errors
flags.py   arguments that several commands share, and flags from option dataclasses
models.py  commands for models: build, plan, explain, grad, ops, lower, check, profiles, probe
hardware.py commands for devices: devices, check-device
runs.py    commands for training: train, eval, profile, export, lr-find, finetune, federate
"""

import typer

from onnxtrain.cli.hardware import check_device, devices
from onnxtrain.cli.models import build, check, explain, grad, lower, ops, plan, probe, profiles
from onnxtrain.cli.runs import (
    evaluate,
    example,
    export,
    federate,
    finetune,
    lr_find,
    profile,
    train,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    # The help text lists them in this order: that of a first run, then what fewer people need.
    app.command("example")(example)
    app.command("explain")(explain)
    app.command("build")(build)
    app.command("lr-find")(lr_find)
    app.command("train")(train)
    app.command("eval")(evaluate)
    app.command("export")(export)
    app.command("finetune")(finetune)
    app.command("plan")(plan)
    app.command("profile")(profile)
    app.add_typer(federate, name="federate")
    app.command("grad")(grad)
    app.command("ops")(ops)
    app.command("lower")(lower)
    app.command("check")(check)
    app.command("devices")(devices)
    app.command("check-device")(check_device)
    app.command("profiles")(profiles)
    app.add_typer(probe, name="probe")
