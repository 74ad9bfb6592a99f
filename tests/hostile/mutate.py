"""Mutate protobuf fields of a model: the result still parses and is often meaningful."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx

from tests.hostile.base_models import MODELS, base_model
from tests.hostile.traps import LOCATIONS

EXTERNAL = 17  # seed % 20 of cases whose models have external data

_INTEGERS = (-(2**63), -(2**31), -9, -2, -1, 0, 1, 2, 3, 7, 64, 65537, 2**31, 2**40, 2**63 - 1)
_FLOATS = (-1.0, 0.0, 1e-12, 0.5, 1e30, float("inf"), float("nan"))
_STRINGS = ("", "x", "y", "nope", "a*b+1", "(n+1)*(n+2)", "if", "é", "..", "SAME_UPPER", "n" * 5000)
_DATA = ("raw_data", "float_data", "double_data")  # not mutated, so that weights stay finite

_Message = Any
_Place = tuple[_Message, Any]  # a message and the descriptor of one of its fields


def mutant(seed: int) -> tuple[str, bytes]:
    """Return the name of a base model and the bytes of a mutated copy."""
    rng = random.Random(seed)
    name = rng.choice(sorted(MODELS))
    model = base_model(name)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _CHANGES[rng.randrange(len(_CHANGES))](rng, model)
    if seed % 20 == EXTERNAL:
        _make_external(rng, model)
    return name, model.SerializeToString()


def _make_external(rng: random.Random, model: onnx.ModelProto) -> None:
    """Move the data of some tensors to external data with hostile locations."""
    tensors = [m for m in _messages(model) if m.DESCRIPTOR.name == "TensorProto"]
    if not tensors:
        tensors = [model.graph.initializer.add(name="x", data_type=1, dims=[4])]
    for tensor in rng.sample(tensors, min(len(tensors), rng.choice((1, 1, 2)))):
        for field in ("raw_data", "float_data", "int64_data", "int32_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=rng.choice(LOCATIONS))
        for key in ("offset", "length"):
            if rng.random() < 0.4:
                value = rng.choice((0, 4, 16, 2048, -1, 2**63, "4x", ""))
                tensor.external_data.add(key=key, value=str(value))


def _messages(message: _Message) -> Iterator[_Message]:
    """Yield the messages nested in a message, at any depth."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                yield part
                yield from _messages(part)


def _places(message: _Message) -> Iterator[_Place]:
    """Yield the fields that are set in a message, at any depth."""
    for field, value in message.ListFields():
        yield message, field
        if field.type != field.TYPE_MESSAGE:
            continue
        for part in value if field.is_repeated else (value,):
            yield from _places(part)


def _drop(rng: random.Random, model: onnx.ModelProto) -> None:
    message, field = rng.choice(list(_places(model)))
    values = getattr(message, field.name)
    if field.is_repeated and rng.random() < 0.8:
        del values[rng.randrange(len(values))]
    else:
        message.ClearField(field.name)


def _repeated(rng: random.Random, model: onnx.ModelProto) -> Any:
    lists = [getattr(m, f.name) for m, f in _places(model) if f.is_repeated]
    return rng.choice(lists)


def _duplicate(rng: random.Random, model: onnx.ModelProto) -> None:
    values = _repeated(rng, model)
    for _ in range(rng.choice((1, 1, 1, 40))):
        values.extend([values[rng.randrange(len(values))]])


def _swap(rng: random.Random, model: onnx.ModelProto) -> None:
    values = _repeated(rng, model)
    parts = list(values)
    rng.shuffle(parts)
    copies = [_copy(p) for p in parts]
    del values[:]
    values.extend(copies)


def _copy(part: Any) -> Any:
    if not hasattr(part, "CopyFrom"):
        return part
    other = type(part)()
    other.CopyFrom(part)
    return other


def _cross(rng: random.Random, model: onnx.ModelProto) -> None:
    """Replace a message by a copy of another message of its type."""
    messages: dict[str, list[_Message]] = {}
    for message, field in _places(model):
        if field.type == field.TYPE_MESSAGE:
            values = getattr(message, field.name)
            parts = list(values) if field.is_repeated else [values]
            messages.setdefault(field.message_type.name, []).extend(parts)
    several = [parts for _, parts in sorted(messages.items()) if len(parts) > 1]
    first, second = rng.sample(rng.choice(several), 2)
    first.CopyFrom(_copy(second))


def _set_value(rng: random.Random, model: onnx.ModelProto) -> None:
    """Change a scalar field; a string mostly becomes another string of the model."""
    plain = [(m, f) for m, f in _places(model) if f.type != f.TYPE_MESSAGE and f.name not in _DATA]
    message, field = rng.choice(plain)
    value = _value(rng, field, plain)
    if value is None:
        return
    try:
        if field.is_repeated:
            values = getattr(message, field.name)
            values[rng.randrange(len(values))] = value
        else:
            setattr(message, field.name, value)
    except ValueError:  # too large for the field, or not valid UTF-8
        message.ClearField(field.name)


def _value(rng: random.Random, field: Any, plain: list[_Place]) -> Any:
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == field.CPPTYPE_STRING:
        known = [getattr(m, f.name) for m, f in plain if f.type == field.type and not f.is_repeated]
        value = rng.choice(known) if known and rng.random() < 0.6 else rng.choice(_STRINGS)
        if field.type == field.TYPE_BYTES:
            return value if isinstance(value, bytes) else value.encode()
        return value
    return rng.choice(_INTEGERS)


_CHANGES: tuple[Callable[[random.Random, onnx.ModelProto], None], ...] = (
    _drop,
    _duplicate,
    _swap,
    _cross,
    _set_value,
    _set_value,
    _set_value,
)
