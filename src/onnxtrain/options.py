"""Options declared once, as a dataclass: name, default, command line flag and manifest entry.

A function of the API lists its options as keywords, for editors, and collects them with
:func:`from_arguments`. The command line uses the flags, the manifest the recorded values.

>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Options:
...     names: tuple[str, ...] = option((), Flag(list, "Names.", name="name"), record=list)
...     loud: bool = option(False)
>>> def call(where, *, names=(), loud=False):
...     return from_arguments(Options, locals())
>>> call("here", names=("a",))
Options(names=('a',), loud=False)
>>> recorded_options(call("here", names=("a",)))
{'names': ['a']}
>>> list(flags(Options))
['names']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_FLAG, _RECORD, _CONVERT = "flag", "record", "convert"


@dataclasses.dataclass(frozen=True)
class Flag:
    """The command line flag of an option.

    Args:
        kind: the type of the flag; a list makes it repeatable.
        help: one line.
        name: the name of the flag, with underscores. By default, the name of the option.
        default: the default on the command line, for options that are required in Python.
    """

    kind: Any
    help: str
    name: str | None = None
    default: Any = None


def option(
    default: Any = dataclasses.MISSING,
    flag: Flag | None = None,
    record: Callable[[Any], Any] | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the field of an option.

    Args:
        default: the default; without one the option is required.
        flag: the command line flag, if any.
        record: converts the value to JSON for the manifest; ``None`` does not record it.
        convert: converts the argument to the value, for :func:`convert_fields`. It must accept its
            own results.
    """
    metadata = {_FLAG: flag, _RECORD: record, _CONVERT: convert}
    return dataclasses.field(default=default, metadata=metadata)


def convert_fields(options: Any) -> None:
    """Replace arguments by their values, in the ``__post_init__`` of a frozen dataclass.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     names: tuple[str, ...] = option((), convert=tuple)
    ...     def __post_init__(self):
    ...         convert_fields(self)
    >>> Options(["a"])
    Options(names=('a',))
    """
    for field in dataclasses.fields(options):
        convert = field.metadata.get(_CONVERT)
        if convert is not None:
            object.__setattr__(options, field.name, convert(getattr(options, field.name)))


def unchanged(value: T) -> T:
    """Return the value; the ``record`` of options that are valid JSON."""
    return value


def from_arguments(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return the options dataclass from the arguments of a function: its initial ``locals()``."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{f.name: arguments[f.name] for f in fields})


def recorded_options(options: Any) -> dict[str, Any]:
    """Return the recorded options by name, as JSON."""
    return {
        f.name: f.metadata[_RECORD](getattr(options, f.name))
        for f in dataclasses.fields(options)
        if f.metadata.get(_RECORD) is not None
    }


def flags(kind: Any) -> dict[str, Flag]:
    """Return the flags of a dataclass by option name, with flag names filled in.

    A flag without a default has that of the option, if the command line can express it.
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


__all__ = [
    "Flag",
    "convert_fields",
    "flags",
    "from_arguments",
    "option",
    "recorded_options",
    "unchanged",
]
