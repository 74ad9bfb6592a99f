"""What one graph needs while it runs: results by their lifetimes, room in the arena, workspaces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.memory import Arena, Event, Sizes, lifetimes, peak_of, run_order
from onnxtrain.graph.shapes import dims as D
from onnxtrain.planning.numbers import open_sizes

_LISTED = {"ScatterND": True, "GatherND": True, "ScatterElements": False}
"""Operators that list where they read or write, and whether a row of indices is one place."""
_RUNS = 3  # pieces lie elsewhere in the second step than in the first


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that a run needs besides its weights and results.

    Attributes:
        live: the most that results take at a time.
        arena: what the arena has touched after some runs: ``live``, gaps and tables.
        at: the node at which ``live`` is reached.
        unknown: values whose size cannot be told; they count as nothing.
    """

    live: int
    arena: int
    at: str
    unknown: tuple[str, ...]


class ExecutedGraph:
    """A graph as it runs; tells its memory at any sizes.

    Args:
        executed: what the runtime has made of the file.
        written: the file that it was made from, which knows more about sizes.
        elsewhere: outputs for which memory is there already.
    """

    def __init__(
        self, executed: onnx.ModelProto, written: onnx.ModelProto, elsewhere: Collection[str]
    ) -> None:
        # A model holds its graph, and a graph its nodes: without it they would be let go.
        self._models = (ir.from_proto(executed), ir.from_proto(written))
        own = list(self._models[1].graph)
        self._known = {y.name: y for node in own for y in node.outputs if y.name}
        self._elsewhere = set(elsewhere)
        self.weights = dict(self._models[0].graph.initializers)
        self.nodes = run_order(_as_created(list(self._models[0].graph), own))

    def memory(self, symbols: Mapping[str, int]) -> StepMemory:
        """Return the memory of a step at numbers for symbolic sizes."""
        told = {**open_sizes(self.nodes, self._known, symbols), **symbols}
        sizes = Sizes({**self._counted(told), **told})

        made = self._made_by_runtime(sizes)

        def size(x: ir.Value) -> int:
            name = x.name or ""
            return made[name] if name in made else sizes(self._known.get(name, x))

        events = lifetimes(self.nodes, size, elsewhere=self._elsewhere)
        live, at = _live(events)
        arena = Arena()
        for _ in range(_RUNS):
            _serve(arena, events, sizes)
        unknown = sorted(n for n in sizes.unknown - set(made) if n)
        return StepMemory(live, arena.touched, at, tuple(unknown))

    def _made_by_runtime(self, sizes: Sizes) -> dict[str, int]:
        """Return the bytes of results that the runtime has put in between and tells no shape of.

        They are another layout of what they were made from, or a part of it.
        """
        made: dict[str, int] = {}
        for node in self.nodes:
            for y in node.outputs:
                dims = S.dims_of(self._known.get(y.name or "", y))
                if not y.name or (dims is not None and sizes.elements(dims) is not None):
                    continue
                sources = (x for x in node.inputs if x is not None)
                whole = max(
                    (
                        made.get(x.name or "", sizes(self._known.get(x.name or "", x)))
                        for x in sources
                    ),
                    default=0,
                )
                made[y.name] = math.ceil(whole * _share(node, y))
        return made

    def _counted(self, symbols: Mapping[str, int]) -> dict[str, int]:
        """Return bounds for sizes that data decide: all elements that there are to choose from."""
        sizes, counted = Sizes(symbols), dict[str, int]()
        for node in self.nodes:
            if node.op_type != "NonZero":
                continue
            x, y = node.inputs[0], self._known.get(node.outputs[0].name or "")
            dims = None if x is None else S.dims_of(self._known.get(x.name or "", x))
            own = None if y is None else S.dims_of(y)
            if dims is None or own is None or (count := sizes.elements(dims)) is None:
                continue
            counted |= dict.fromkeys(D.symbols(own[-1]), count)
        return counted


def _share(node: ir.Node, y: ir.Value) -> float:
    """Return how much of its source a result is: a part of what is split."""
    if node.op_type != "Split":
        return 1.0
    place, count = node.outputs.index(y), len(node.outputs)
    lengths = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if lengths is None else lengths.const_value
    if tensor is None or tensor.size != count or not tensor.numpy().sum():
        return 1.0 / count
    return float(tensor.numpy()[place] / tensor.numpy().sum())


def _as_created(executed: list[ir.Node], own: list[ir.Node]) -> list[ir.Node]:
    """Return what runs in the order of the file, with nodes that the runtime made at the end."""
    place = {node.name: i for i, node in enumerate(own)}
    kept = [n for n in executed if n.name in place]
    return [
        *sorted(kept, key=lambda n: place[n.name]),
        *(n for n in executed if n.name not in place),
    ]


def _live(events: list[Event]) -> tuple[int, str]:
    now = most = 0
    at, held = "", dict[str, int]()
    for event in events:
        held.update(event.new)
        now += sum(event.new.values())
        if now > most:
            most, at = now, f"{event.node.op_type} {event.node.name!r}"
        now -= sum(held.pop(name) for name in event.free)
    return most, at


def _serve(arena: Arena, events: list[Event], sizes: Sizes) -> None:
    held = {}
    for event in events:
        for name, size in event.new.items():
            held[name] = arena.allocate(size)
        if work := _workspace(event.node, sizes):
            arena.release(arena.allocate(work))
        for name in event.free:
            arena.release(held.pop(name))


def _workspace(node: ir.Node, sizes: Sizes) -> int:
    """Return the memory that a kernel takes for itself while it runs."""
    bodies = list(subgraphs_of(node))
    if bodies:
        return max(peak_of(list(g), sizes) for g in bodies)
    if node.op_type == "ConvTranspose":
        return _columns(node, sizes)
    if node.op_type in _LISTED:
        return _places(node, sizes)
    if node.op_type == "Einsum":  # operands and result in the order of a product
        return sum(sizes(x) for x in (*node.inputs, *node.outputs) if x is not None)
    return 0


def _places(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of a list of places: a number of 64 bits for each index, or each row."""
    indices = node.inputs[1]
    dims = None if indices is None else S.dims_of(indices)
    if not dims:
        return 0
    return 8 * (sizes.elements(dims[:-1] if _LISTED[node.op_type] else dims) or 0)


def _columns(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of one image's columns: channels and kernel by places of the input."""
    x, w = node.inputs[0], node.inputs[1]
    image, kernel = (None if v is None else S.dims_of(v) for v in (x, w))
    if image is None or kernel is None:
        return 0
    places, taps = sizes.elements(image[2:]), sizes.elements(kernel[1:])
    return 0 if places is None or taps is None else math.prod((4, places, taps))
