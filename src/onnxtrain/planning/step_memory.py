"""Simulate the memory of one execution of a graph.

:class:`ExecutedGraph` gives the memory of a graph for given values of symbolic dimensions:

1. :func:`computed_sizes` evaluates the small integer tensors that decide sizes at run time (the
   length of a Range, the end of a Slice).
2. ``graph.memory_usage.lifetimes`` gives the results that each node allocates and frees.
3. ``graph.memory_usage.Arena`` replays them as onnxruntime's arena does, with the workspaces that
   kernels allocate for themselves.
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

_MAX_ELEMENTS = 64  # larger tensors hold data, not sizes
_Arrays = list[np.ndarray]


def computed_sizes(
    nodes: Sequence[ir.Node], known: Mapping[str, ir.Value], symbols: Mapping[str, int]
) -> dict[str, int]:
    """Return values of symbolic dimensions that first appear in a result, not in an input.

    Args:
        nodes: in execution order.
        known: results by name, with the shapes recorded in the file.
        symbols: values of the symbolic dimensions of inputs.
    """
    counted: dict[str, int] = {}
    values: dict[str, np.ndarray] = {}
    sizes = Sizes(symbols)
    for node in nodes:
        y = node.outputs[0] if node.outputs else None
        if y is None or node.domain:
            continue
        inputs = [_known_value(x, values) for x in node.inputs]
        value = _compute_value(node, inputs, known, sizes)
        if value is not None and value.size <= _MAX_ELEMENTS:
            values[y.name or ""] = value
        new = _new_symbols(node, inputs, known, sizes, {**symbols, **counted})
        if new:
            counted |= new
            sizes = Sizes({**symbols, **counted})
    return counted


def _known_value(x: ir.Value | None, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if x is None:
        return None
    if (value := values.get(x.name or "")) is not None:
        return value
    tensor = x.const_value
    if tensor is None or tensor.size > _MAX_ELEMENTS:
        return None
    return tensor.numpy().reshape(-1)


def _compute_value(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> np.ndarray | None:
    """Return the elements of a small result as a vector, if they can be computed."""
    if node.op_type in ("Shape", "Size"):
        dims = _dims(node.inputs[0], known)
        if dims is None:
            return None
        shape = [sizes.elements([d]) for d in dims]
        if any(n is None for n in shape):
            return None
        if node.op_type == "Size":
            return np.array([math.prod(n for n in shape if n is not None)])
        first, last = (node.attributes.get_int(n, d) for n, d in (("start", 0), ("end", len(dims))))
        return np.array(shape[first:last], np.int64)
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
"""Operators on sizes that are evaluated, as functions of flattened inputs."""


def _new_symbols(
    node: ir.Node,
    inputs: list[np.ndarray | None],
    known: Mapping[str, ir.Value],
    sizes: Sizes,
    known_symbols: Mapping[str, int],
) -> dict[str, int]:
    """Return values of the symbolic dimensions that first appear in the result of a node."""
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
    scalars = [a for a in inputs if a is not None and a.size == 1]
    if len(scalars) != 3 or not scalars[2].item():
        return None
    start, limit, step = (float(n.item()) for n in scalars)
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


def _from_shape_input(index: int):
    def read(
        node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
    ) -> list[int | None] | None:
        shape = inputs[index] if len(inputs) > index else None
        return None if shape is None else [int(n) if n > 0 else None for n in shape.tolist()]

    return read


_SIZED = {
    "Range": _range_size,
    "Slice": _slice_sizes,
    "Reshape": _from_shape_input(1),
    "ConstantOfShape": _from_shape_input(0),
    "Expand": _from_shape_input(1),
}
"""Operators whose input values decide the shape of their result."""


def _dims(x: ir.Value | None, known: Mapping[str, ir.Value]) -> Sequence[D.Dim] | None:
    return None if x is None else S.dims_of(known.get(x.name or "", x))


_INDEXED_OPERATORS = {"ScatterND": True, "GatherND": True, "ScatterElements": False}
"""Operators whose kernels compute int64 offsets; whether a row of indices makes one offset."""
_SIMULATED_STEPS = 3  # the arena is fragmented differently after the first step


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that a step needs besides weights and outputs.

    Attributes:
        live: peak of the results that are alive at the same time.
        arena: memory the arena has touched after some steps: ``live``, gaps and tables.
        at: the node at which ``live`` is reached.
        unknown: values of unknown size, which count as 0 bytes.
    """

    live: int
    arena: int
    at: str
    unknown: tuple[str, ...]


class ExecutedGraph:
    """A graph as onnxruntime executes it.

    Args:
        executed: the graph after onnxruntime's optimizations.
        written: the model file, which has shapes for more values.
        elsewhere: outputs that are bound to memory of the caller.
    """

    def __init__(
        self, executed: onnx.ModelProto, written: onnx.ModelProto, elsewhere: Collection[str]
    ) -> None:
        # Keeps the models alive: nodes and values refer to their graph weakly.
        self._models = (ir.from_proto(executed), ir.from_proto(written))
        own = list(self._models[1].graph)
        self._known = {y.name: y for node in own for y in node.outputs if y.name}
        self._elsewhere = set(elsewhere)
        self.weights = dict(self._models[0].graph.initializers)
        self.nodes = run_order(_in_file_order(list(self._models[0].graph), own))

    def memory(self, symbols: Mapping[str, int]) -> StepMemory:
        """Return the memory of a step for given values of symbolic dimensions."""
        known_symbols = {**computed_sizes(self.nodes, self._known, symbols), **symbols}
        sizes = Sizes({**self._data_dependent_bounds(known_symbols), **known_symbols})
        inserted = self._inserted_value_bytes(sizes)

        def size(x: ir.Value) -> int:
            name = x.name or ""
            return inserted[name] if name in inserted else sizes(self._known.get(name, x))

        events = lifetimes(self.nodes, size, elsewhere=self._elsewhere)
        live, at = _peak_live_bytes(events)
        arena = Arena()
        for _ in range(_SIMULATED_STEPS):
            _simulate_step(arena, events, sizes)
        unknown = sorted(n for n in sizes.unknown - set(inserted) if n)
        return StepMemory(live, arena.touched, at, tuple(unknown))

    def _inserted_value_bytes(self, sizes: Sizes) -> dict[str, int]:
        """Return the bytes of values that onnxruntime inserted without a shape.

        They are another layout of an input of their node, or a part of it.
        """
        inserted: dict[str, int] = {}
        for node in self.nodes:
            for y in node.outputs:
                dims = S.dims_of(self._known.get(y.name or "", y))
                if not y.name or (dims is not None and sizes.elements(dims) is not None):
                    continue
                input_sizes = (
                    inserted.get(x.name or "", sizes(self._known.get(x.name or "", x)))
                    for x in node.inputs
                    if x is not None
                )
                share = _share_of_source(node, y)
                inserted[y.name] = math.ceil(max(input_sizes, default=0) * share)
        return inserted

    def _data_dependent_bounds(self, symbols: Mapping[str, int]) -> dict[str, int]:
        """Return upper bounds of dimensions that depend on data: NonZero selects all elements."""
        sizes, bounds = Sizes(symbols), dict[str, int]()
        for node in self.nodes:
            if node.op_type != "NonZero":
                continue
            x, y = node.inputs[0], self._known.get(node.outputs[0].name or "")
            dims = None if x is None else S.dims_of(self._known.get(x.name or "", x))
            own = None if y is None else S.dims_of(y)
            if dims is None or own is None or (count := sizes.elements(dims)) is None:
                continue
            bounds |= dict.fromkeys(D.symbols(own[-1]), count)
        return bounds


def _share_of_source(node: ir.Node, y: ir.Value) -> float:
    """Return the size of a result relative to its source: below 1 for outputs of Split."""
    if node.op_type != "Split":
        return 1.0
    index, count = node.outputs.index(y), len(node.outputs)
    lengths = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if lengths is None else lengths.const_value
    if tensor is None or tensor.size != count or not tensor.numpy().sum():
        return 1.0 / count
    return float(tensor.numpy()[index] / tensor.numpy().sum())


def _in_file_order(executed: list[ir.Node], own: list[ir.Node]) -> list[ir.Node]:
    """Return executed nodes in the order of the file, followed by nodes that onnxruntime added."""
    position = {node.name: i for i, node in enumerate(own)}
    original = [n for n in executed if n.name in position]
    return [
        *sorted(original, key=lambda n: position[n.name]),
        *(n for n in executed if n.name not in position),
    ]


def _peak_live_bytes(events: list[Event]) -> tuple[int, str]:
    """Return the peak of live bytes, and the node at which it is reached."""
    live = peak = 0
    at, allocated = "", dict[str, int]()
    for event in events:
        allocated.update(event.new)
        live += sum(event.new.values())
        if live > peak:
            peak, at = live, f"{event.node.op_type} {event.node.name!r}"
        live -= sum(allocated.pop(name) for name in event.free)
    return peak, at


def _simulate_step(arena: Arena, events: list[Event], sizes: Sizes) -> None:
    chunks = {}
    for event in events:
        for name, size in event.new.items():
            chunks[name] = arena.allocate(size)
        if workspace := _workspace(event.node, sizes):
            arena.release(arena.allocate(workspace))
        for name in event.free:
            arena.release(chunks.pop(name))


def _workspace(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes that a kernel allocates for itself while it runs."""
    bodies = list(subgraphs_of(node))
    if bodies:
        return max(peak_bytes(list(g), sizes) for g in bodies)
    if node.op_type == "ConvTranspose":
        return _column_bytes(node, sizes)
    if node.op_type in _INDEXED_OPERATORS:
        return _index_bytes(node, sizes)
    if node.op_type == "Einsum":  # transposed operands and result
        return sum(sizes(x) for x in (*node.inputs, *node.outputs) if x is not None)
    return 0


def _index_bytes(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of the offsets that a kernel computes: an int64 per index or per row."""
    indices = node.inputs[1]
    dims = None if indices is None else S.dims_of(indices)
    if not dims:
        return 0
    return 8 * (sizes.elements(dims[:-1] if _INDEXED_OPERATORS[node.op_type] else dims) or 0)


def _column_bytes(node: ir.Node, sizes: Sizes) -> int:
    """Return the bytes of the im2col buffer of one image: kernel elements times positions."""
    x, w = node.inputs[0], node.inputs[1]
    image, kernel = (None if v is None else S.dims_of(v) for v in (x, w))
    if image is None or kernel is None:
        return 0
    positions, window = sizes.elements(image[2:]), sizes.elements(kernel[1:])
    return 0 if positions is None or window is None else math.prod((4, positions, window))
