"""What one graph needs while it runs: results by their lifetimes, room in the arena, workspaces.

Numbers that a graph computes from sizes: how long a Range is, where a Slice ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.memory_usage import Arena, Event, Sizes, lifetimes, peak_bytes, run_order
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.graph.shapes import dims as D

_MAX_ELEMENTS = 64  # numbers of a result that is followed
_Arrays = list[np.ndarray]


def computed_sizes(
    nodes: Sequence[ir.Node], known: Mapping[str, ir.Value], symbols: Mapping[str, int]
) -> dict[str, int]:
    """Return numbers for symbols that no input has: results of a size that other sizes decide.

    Args:
        nodes: in the order in which they run.
        known: results by name, with the shapes that the file gives them.
        symbols: numbers for the symbols of inputs.
    """
    counted: dict[str, int] = {}
    values: dict[str, np.ndarray] = {}
    sizes = Sizes(symbols)
    for node in nodes:
        y = node.outputs[0] if node.outputs else None
        if y is None or node.domain:
            continue
        inputs = [_known_value(x, values) for x in node.inputs]
        made = _compute_value(node, inputs, known, sizes)
        if made is not None and made.size <= _MAX_ELEMENTS:
            values[y.name or ""] = made
        more = _new_symbols(node, inputs, known, sizes, {**symbols, **counted})
        if more:
            counted |= more
            sizes = Sizes({**symbols, **counted})
    return counted


def _known_value(x: ir.Value | None, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if x is None:
        return None
    if (number := values.get(x.name or "")) is not None:
        return number
    tensor = x.const_value
    if tensor is None or tensor.size > _MAX_ELEMENTS:
        return None
    return tensor.numpy().reshape(-1)


def _compute_value(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> np.ndarray | None:
    """Return the numbers of a small result, in a row, if they can be told."""
    if node.op_type in ("Shape", "Size"):
        dims = _dims(node.inputs[0], known)
        if dims is None:
            return None
        numbers = [sizes.elements([d]) for d in dims]
        if any(n is None for n in numbers):
            return None
        if node.op_type == "Size":
            return np.array([math.prod(n for n in numbers if n is not None)])
        first, last = (node.attributes.get_int(n, d) for n, d in (("start", 0), ("end", len(dims))))
        return np.array(numbers[first:last], np.int64)
    compute = _COMPUTED.get(node.op_type)
    arrays = [a for a in inputs if a is not None]
    if compute is None or len(arrays) != len(inputs):
        return None
    return compute(arrays)


def _divide(arrays: _Arrays) -> np.ndarray:
    a, b = arrays
    if not np.all(b):
        return np.zeros(0)
    return a // b if "i" in a.dtype.kind + b.dtype.kind else a / b


_COMPUTED: dict[str, Callable[[_Arrays], np.ndarray]] = {
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast"), lambda a: a[0]),
    "Add": lambda a: a[0] + a[1],
    "Sub": lambda a: a[0] - a[1],
    "Mul": lambda a: a[0] * a[1],
    "Div": _divide,
    "Max": lambda a: np.maximum.reduce(np.broadcast_arrays(*a)),
    "Min": lambda a: np.minimum.reduce(np.broadcast_arrays(*a)),
    "Ceil": lambda a: np.ceil(a[0]),
    "Floor": lambda a: np.floor(a[0]),
    "Concat": np.concatenate,
    "ReduceProd": lambda a: np.prod(a[0], keepdims=True),
}
"""Operators that are followed, on numbers in a row."""


def _new_symbols(
    node: ir.Node,
    inputs: list[np.ndarray | None],
    known: Mapping[str, ir.Value],
    sizes: Sizes,
    known_symbols: Mapping[str, int],
) -> dict[str, int]:
    """Return numbers for symbols that come up with a node's result."""
    read = _SIZED.get(node.op_type)
    dims = _dims(node.outputs[0], known)
    if read is None or dims is None:
        return {}
    lengths = read(node, inputs, known, sizes)
    if lengths is None or len(lengths) != len(dims):
        return {}
    new = {}
    for d, n in zip(dims, lengths, strict=True):
        if isinstance(d, str) and n is not None and n >= 0 and _is_symbol(d):
            (name,) = D.symbols(d)
            if name not in known_symbols:
                new[name] = n
    return new


def _is_symbol(d: str) -> bool:
    names = list(D.symbols(d))
    return len(names) == 1 and all(D.substitute(d, {names[0]: n}) == n for n in (2, 3))


def _range_size(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> list[int | None] | None:
    numbers = [a for a in inputs if a is not None and a.size == 1]
    if len(numbers) != 3 or not numbers[2].item():
        return None
    start, limit, step = (float(n.item()) for n in numbers)
    return [max(0, math.ceil((limit - start) / step))]


def _slice_sizes(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> list[int | None] | None:
    dims = _dims(node.inputs[0], known)
    if dims is None or len(inputs) < 3 or any(a is None for a in inputs[1:]):
        return None
    starts, ends = (np.asarray(a).tolist() for a in inputs[1:3])
    axes = range(len(starts)) if len(inputs) < 4 else np.asarray(inputs[3]).tolist()
    steps = [1] * len(starts) if len(inputs) < 5 else np.asarray(inputs[4]).tolist()
    lengths = [sizes.elements([d]) for d in dims]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        whole = lengths[axis]
        if whole is not None:
            lengths[axis] = len(range(whole)[slice(int(start), int(end), int(step))])
    return lengths


def _by_shape(place: int):
    def read(
        node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
    ) -> list[int | None] | None:
        shape = inputs[place] if len(inputs) > place else None
        return None if shape is None else [int(n) if n > 0 else None for n in shape.tolist()]

    return read


_SIZED = {
    "Range": _range_size,
    "Slice": _slice_sizes,
    "Reshape": _by_shape(1),
    "ConstantOfShape": _by_shape(0),
    "Expand": _by_shape(1),
}
"""Operators whose numbers decide how large their result is."""


def _dims(x: ir.Value | None, known: Mapping[str, ir.Value]) -> Sequence[D.Dim] | None:
    return None if x is None else S.dims_of(known.get(x.name or "", x))


_INDEXED_OPERATORS = {"ScatterND": True, "GatherND": True, "ScatterElements": False}
"""Operators that list where they read or write, and whether a row of indices is one place."""
_SIMULATED_STEPS = 3  # pieces lie elsewhere in the second step than in the first


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
        self.nodes = run_order(_in_file_order(list(self._models[0].graph), own))

    def memory(self, symbols: Mapping[str, int]) -> StepMemory:
        """Return the memory of a step at numbers for symbolic sizes."""
        known_symbols = {**computed_sizes(self.nodes, self._known, symbols), **symbols}
        sizes = Sizes({**self._counted(known_symbols), **known_symbols})

        made = self._runtime_value_bytes(sizes)

        def size(x: ir.Value) -> int:
            name = x.name or ""
            return made[name] if name in made else sizes(self._known.get(name, x))

        events = lifetimes(self.nodes, size, elsewhere=self._elsewhere)
        live, at = _peak_live_bytes(events)
        arena = Arena()
        for _ in range(_SIMULATED_STEPS):
            _simulate_step(arena, events, sizes)
        unknown = sorted(n for n in sizes.unknown - set(made) if n)
        return StepMemory(live, arena.touched, at, tuple(unknown))

    def _runtime_value_bytes(self, sizes: Sizes) -> dict[str, int]:
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
                made[y.name] = math.ceil(whole * _share_of_source(node, y))
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


def _share_of_source(node: ir.Node, y: ir.Value) -> float:
    """Return how much of its source a result is: a part of what is split."""
    if node.op_type != "Split":
        return 1.0
    place, count = node.outputs.index(y), len(node.outputs)
    lengths = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if lengths is None else lengths.const_value
    if tensor is None or tensor.size != count or not tensor.numpy().sum():
        return 1.0 / count
    return float(tensor.numpy()[place] / tensor.numpy().sum())


def _in_file_order(executed: list[ir.Node], own: list[ir.Node]) -> list[ir.Node]:
    """Return what runs in the order of the file, with nodes that the runtime made at the end."""
    place = {node.name: i for i, node in enumerate(own)}
    kept = [n for n in executed if n.name in place]
    return [
        *sorted(kept, key=lambda n: place[n.name]),
        *(n for n in executed if n.name not in place),
    ]


def _peak_live_bytes(events: list[Event]) -> tuple[int, str]:
    now = most = 0
    at, held = "", dict[str, int]()
    for event in events:
        held.update(event.new)
        now += sum(event.new.values())
        if now > most:
            most, at = now, f"{event.node.op_type} {event.node.name!r}"
        now -= sum(held.pop(name) for name in event.free)
    return most, at


def _simulate_step(arena: Arena, events: list[Event], sizes: Sizes) -> None:
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
        return max(peak_bytes(list(g), sizes) for g in bodies)
    if node.op_type == "ConvTranspose":
        return _column_bytes(node, sizes)
    if node.op_type in _INDEXED_OPERATORS:
        return _index_bytes(node, sizes)
    if node.op_type == "Einsum":  # operands and result in the order of a product
        return sum(sizes(x) for x in (*node.inputs, *node.outputs) if x is not None)
    return 0


def _index_bytes(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of a list of places: a number of 64 bits for each index, or each row."""
    indices = node.inputs[1]
    dims = None if indices is None else S.dims_of(indices)
    if not dims:
        return 0
    return 8 * (sizes.elements(dims[:-1] if _INDEXED_OPERATORS[node.op_type] else dims) or 0)


def _column_bytes(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of one image's columns: channels and kernel by places of the input."""
    x, w = node.inputs[0], node.inputs[1]
    image, kernel = (None if v is None else S.dims_of(v) for v in (x, w))
    if image is None or kernel is None:
        return 0
    places, taps = sizes.elements(image[2:]), sizes.elements(kernel[1:])
    return 0 if places is None or taps is None else math.prod((4, places, taps))
