"""The page of the command line, made of the commands themselves."""

from __future__ import annotations

from typing import Any

import typer

from onnxtrain.cli.main import app


def page() -> str:
    """Return the page: each command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    about = (
        "`python -m onnxtrain` is the same as `onnxtrain`. Errors are one readable block and exit "
        "code 1; `--debug` shows tracebacks."
    )
    return "\n\n".join(["# Command line", about, *_commands(group, "onnxtrain")]) + "\n"


def _commands(group: Any, before: str) -> list[str]:
    parts: list[str] = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        called = f"{before} {name}"
        if hasattr(command, "commands"):
            parts += _commands(command, called)
            continue
        about = (command.help or "").strip().replace("\n", " ")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([called, *(_argument(p) for p in arguments), "[OPTIONS]"])
        parts += [f"## {called}", about, f"```text\n{usage}\n```", _table(command.params)]
    return parts


def _argument(parameter: Any) -> str:
    name = parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _kind(parameter: Any) -> str:
    """Return the name of a parameter's type, which releases of typer keep in different places."""
    described = getattr(parameter, "type_descriptor", None)
    annotation = getattr(described, "annotation", None)
    if annotation is None:
        return str(parameter.type.name)
    return str(getattr(annotation, "__name__", annotation)).lower()


def _table(parameters: list[Any]) -> str:
    rows = ["| | | |", "|---|---|---|"]
    for p in parameters:
        names = ", ".join(f"`{o}`" for o in p.opts)
        if p.param_type_name == "argument":
            names = f"`{p.name.upper()}`"
        kind = "" if getattr(p, "is_flag", False) else _kind(p)
        kind += ", repeatable" if getattr(p, "multiple", False) else ""
        usual = "(required)" if p.required else ""
        if not p.required and p.default not in (None, False, (), "") and not callable(p.default):
            usual = f"(default `{p.default}`)"
        about = (getattr(p, "help", "") or "").replace("|", "\\|")
        rows.append(f"| {names} | {kind} | {about} {usual} |")
    return "\n".join(rows)
