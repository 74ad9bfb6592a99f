"""From when until when each result of a graph needs memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import captured
from onnxtrain.graph.memory.reuse import is_view, may_write_over

Size = Callable[[ir.Value], int]
Same = Callable[[ir.Value, ir.Value], bool]


@dataclasses.dataclass
class Event:
    """What one node asks for and what is free behind it; memory is known by a value's name."""

    node: ir.Node
    new: dict[str, int]
    """Results that need memory of their own, in bytes."""
    free: list[str]


def lifetimes(
    nodes: Sequence[ir.Node],
    size: Size,
    *,
    elsewhere: Collection[str] = (),
    same: Same | None = None,
) -> list[Event]:
    """Return what happens to memory at each node.

    Args:
        nodes: in the order in which they run.
        size: tells the bytes of a value.
        elsewhere: names of results that are written to memory that is there already.
        same: whether the runtime knows that two values have one type and shape; by what we know,
            unless given.
    """
    same = same or _same_shape
    read = [[x for x in (*n.inputs, *captured(n)) if x is not None] for n in nodes]
    uses = Counter(x.name or "" for values in read for x in values)
    home: dict[str, str] = {}  # whose memory a value lies in; what others own is not in here
    left: Counter[str] = Counter()  # uses to come, of all values in a home
    events = []
    for node, values in zip(nodes, read, strict=True):
        event = Event(node, {}, [])
        for i, y in enumerate(node.outputs):
            name = y.name or ""
            if not name or name in elsewhere:
                continue
            place = name if i else _place(node, y, home, left, same)
            if place is None:
                continue  # a view of what others own
            home[name] = place
            left[place] += uses[name]
            if place == name:
                event.new[name] = size(y)
        for x in values:
            if (place := home.get(x.name or "")) is not None:
                left[place] -= 1
        touched = dict.fromkeys(home.get(x.name or "") for x in (*values, *node.outputs))
        event.free = [p for p in touched if p is not None and not left[p]]
        events.append(event)
    return events


def _place(
    node: ir.Node, y: ir.Value, home: dict[str, str], left: Counter[str], same: Same
) -> str | None:
    """Return whose memory a first result gets: its own, that of a source, or none of ours."""
    inputs = node.inputs
    if is_view(node):
        return None if inputs[0] is None else home.get(inputs[0].name or "")
    i = may_write_over(node)
    x = inputs[i] if i is not None and i < len(inputs) else None
    place = None if x is None else home.get(x.name or "")
    if x is not None and place is not None and left[place] == 1 and same(x, y):
        return place
    return y.name


def _same_shape(x: ir.Value, y: ir.Value) -> bool:
    dims = S.dims_of(x)
    return _width(x) == _width(y) and dims is not None and None not in dims and dims == S.dims_of(y)


def _width(x: ir.Value) -> int | None:
    return None if x.dtype is None else x.dtype.bitwidth
