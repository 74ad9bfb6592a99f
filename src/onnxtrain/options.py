"""Options declared once: the fields of a dataclass tell name, default, flag and what is recorded.

A function of the API spells its options out as keywords, for editors, and gathers them by
:func:`from_arguments`. The command line is made of the flags, the manifest of the records.

>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Options:
...     names: tuple[str, ...] = option((), Flag(list, "Which.", name="name"), record=list)
...     loud: bool = option(False)
>>> def call(where, *, names=(), loud=False):
...     return from_arguments(Options, locals())
>>> call("here", names=("a",))
Options(names=('a',), loud=False)
>>> recorded(call("here", names=("a",)))
{'names': ['a']}
>>> list(flags(Options))
['names']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_FLAG, _RECORD = "flag", "record"


@dataclasses.dataclass(frozen=True)
class Flag:
    """How an option is given on the command line.

    Args:
        kind: the type there; of a list, the flag is repeatable.
        help: one line.
        name: of the flag, with underscores, if not that of the option.
        default: on the command line, if the option itself has to be given.
    """

    kind: Any
    help: str
    name: str | None = None
    default: Any = None


def option(
    default: Any = dataclasses.MISSING,
    flag: Flag | None = None,
    record: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the field of an option.

    Args:
        default: what it is unless given; without one, it must be given.
        flag: its place on the command line, if it has one.
        record: makes of its value what a file keeps of it, ready for JSON; ``None`` keeps nothing.
    """
    return dataclasses.field(default=default, metadata={_FLAG: flag, _RECORD: record})


def unchanged(value: T) -> T:
    """Return the value: a record of options that JSON has words for."""
    return value


def from_arguments(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return the options among a function's arguments, its ``locals()`` before all else."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{f.name: arguments[f.name] for f in fields})


def recorded_options(options: Any) -> dict[str, Any]:
    """Return what a file keeps of the options, by name."""
    return {
        f.name: f.metadata[_RECORD](getattr(options, f.name))
        for f in dataclasses.fields(options)
        if f.metadata.get(_RECORD) is not None
    }


def flags(kind: Any) -> dict[str, Flag]:
    """Return the flags of a dataclass by the name of the option; the flag's name is filled in.

    A flag without a default of its own has that of the option, if the command line can say it.
    """
    declared: dict[str, Flag] = {}
    for field in dataclasses.fields(kind):
        flag: Flag | None = field.metadata.get(_FLAG)
        if flag is None:
            continue
        default = flag.default
        if default is None and field.default != ():
            default = field.default
        declared[field.name] = dataclasses.replace(
            flag, name=flag.name or field.name, default=default
        )
    return declared


__all__ = ["Flag", "flags", "from_arguments", "option", "recorded_options", "unchanged"]
