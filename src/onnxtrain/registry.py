"""Registries of classes by name: losses, metrics, optimizers and schedules.

A string may have a name and options, as on the command line.

>>> SHAPES: Registry[object] = Registry("shape")
>>> @SHAPES.named("square", "box")
... @dataclasses.dataclass(frozen=True)
... class Square:
...     side: float = 1.0
>>> SHAPES.make("box:side=2")
Square(side=2)
>>> list(SHAPES)
['square', 'box']
>>> parse_options("cosine:warmup=10,total=100")
('cosine', {'warmup': 10, 'total': 100})
>>> parse_options("multi_step:milestones=[30,60],gamma=0.2")
('multi_step', {'milestones': [30, 60], 'gamma': 0.2})
>>> parse_options("mse")
('mse', {})
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import numbers
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from onnxtrain.errors import PrepareError

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)
_LITERALS = {"true": True, "false": False, "none": None}


class Registry(Mapping[str, type[T]]):
    """Dataclasses of one kind by name, in the order of registration.

    Args:
        what: the kind, for messages: ``"loss"``.
        attribute: a class attribute to set to the first name, if any.
    """

    def __init__(self, what: str, attribute: str | None = None) -> None:
        self.what, self.attribute = what, attribute
        self._kinds: dict[str, type[T]] = {}

    def named(self, name: str, *aliases: str) -> Callable[[Kind], Kind]:
        """Return a decorator that registers a class; put it above ``@dataclass``.

        Raises:
            PrepareError: another class has the name.
        """

        def register(kind: Kind) -> Kind:
            for key in (name, *aliases):
                other = self._kinds.get(key, kind)
                # The same class again: a notebook cell that ran twice.
                if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
                    raise PrepareError(
                        f"the {self.what} {key!r} is {other.__module__}.{other.__qualname__}\n"
                        f"hint: choose another name for {kind.__qualname__}"
                    )
            self._kinds.update(dict.fromkeys((name, *aliases), cast("type[T]", kind)))
            if self.attribute is not None and self.attribute not in vars(kind):
                setattr(kind, self.attribute, name)
            return kind

        return register

    def __getitem__(self, name: str) -> type[T]:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def find(self, name: str) -> type[T] | None:
        """Return the class of a name, ignoring case; dashes equal underscores."""
        return self._kinds.get(name.lower().replace("-", "_"))

    def make(self, text: str, options: Mapping[str, Any] | None = None) -> T:
        """Create an object from a name with options; options in ``text`` take precedence.

        Args:
            text: a name, or a name with options.
            options: further options.

        Raises:
            PrepareError: a name or an option is unknown, or an option is missing.
        """
        name, given = parse_options(text)
        kind: Any = self.find(name)
        if kind is None:
            raise unknown_name_error(name, self, self.what)
        fields = [f for f in dataclasses.fields(kind) if f.init]
        known = [f.name for f in fields]
        settings = {**(options or {}), **given}
        wrong = [key for key in settings if key not in known]
        if wrong:
            raise PrepareError(
                f"{name} has no option {', '.join(map(repr, wrong))}\n"
                f"hint: it has {', '.join(known) or 'none'}"
            )
        missing = [f.name for f in fields if f.name not in settings and _is_required(f)]
        if missing:
            raise PrepareError(
                f"{name} needs {', '.join(missing)}\n"
                f"hint: write {name}:{','.join(f'{m}=...' for m in missing)}"
            )
        _check_types(name, kind, settings)
        return kind(**settings)


def _check_types(name: str, kind: type, settings: Mapping[str, Any]) -> None:
    """Raise if a value does not match the type of its field."""
    try:
        wanted = get_type_hints(kind)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return
    for key, value in settings.items():
        if key in wanted and not _matches_type(value, wanted[key]):
            raise PrepareError(
                f"{name}: {key} cannot be {value!r}\nhint: it is {_describe_type(wanted[key])}"
            )


def _matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type annotation; covers types that text can express."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches_type(value, a) for a in arguments)
    if origin is Literal:
        return value in arguments
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        wanted: type = numbers.Integral if hint is int else numbers.Real
        return type(value) is not bool and isinstance(value, wanted)
    if hint is str:
        return isinstance(value, str)
    kind = origin if origin is not None else hint
    if kind in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        items = list(cast("Sequence[Any]", value))
        inner = [a for a in arguments if a is not Ellipsis]
        if kind is tuple and Ellipsis not in arguments and inner:
            return len(items) == len(inner) and all(map(_matches_type, items, inner))
        return not inner or all(_matches_type(v, inner[0]) for v in items)
    # Other classes check their arguments themselves.
    return True


def _describe_type(hint: Any) -> str:
    """Return a readable name of a type."""
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}
    if hint in words:
        return words[hint]
    if hint is type(None):
        return "none"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (tuple, list, Sequence):
        inner = [a for a in arguments if a is not Ellipsis]
        if len(inner) > 1:
            return f"a list of {len(inner)}: [{', '.join(map(_describe_type, inner))}]"
        return f"a list of values, each {_describe_type(inner[0])}"
    return getattr(hint, "__name__", str(hint))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``"name:key=value,key=value"``.

    A value is a number, a list in brackets, true, false, none, or a string.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    # Commas inside brackets belong to a list.
    parts = re.split(r",(?![^\[(]*[\])])", rest) if colon else []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise PrepareError(
                f"not an option: {part!r} in {text!r}\nhint: write name:key=value,key=value"
            )
        options[key.strip()] = _parse_value(value.strip())
    return name.strip(), options


def unknown_name_error(name: str, choices: Iterable[str], what: str) -> PrepareError:
    """Return the error for an unknown name, with the nearest choices first."""
    known = list(choices)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if near:
        return PrepareError(f"unknown {what}: {name!r}\nhint: did you mean {' or '.join(near)}?")
    return PrepareError(f"unknown {what}: {name!r} (expected one of {', '.join(known)})")


def _parse_value(text: str) -> Any:
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


__all__ = ["Registry", "parse_options", "unknown_name_error"]
