"""Commands whose flags are made of declared options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from typer import Option

from onnxtrain.options import Flag, flags

Asked = dict[str, Any]
"""The options that were given, by name; those left out are not in it."""
Command = Callable[..., None]


def with_flags_of(declared: type) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the flags of a dataclass of options.

    The command gets their values as its first argument, of type :data:`Asked`. Its own parameters
    come before the flags in the help text, or behind them if they are keyword-only.
    """

    def decorate(command: Command) -> Command:
        known = flags(declared)
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(flag.name or name) for name, flag in known.items()}
            command({n: v for n, v in values.items() if v not in (None, [])}, **given)

        first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in (*first, *(_parameter(flag) for flag in known.values()), *last)
        ]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(flag: Flag) -> inspect.Parameter:
    assert flag.name is not None
    # A switch has one name; of others, typer makes it.
    names = [f"--{flag.name.replace('_', '-')}"] if flag.kind is bool else []
    kind = flag.kind if flag.default is not None else flag.kind | None
    required = flag.default is dataclasses.MISSING
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else flag.default,
        annotation=Annotated[kind, Option(*names, help=flag.help)],
    )
