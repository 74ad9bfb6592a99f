"""Estimate and reduce the memory that onnxruntime needs to run a graph on the CPU.

Read in this order: :func:`lifetimes` says at which node each result is allocated and freed, given
the operators that write in place. :func:`peak_bytes` sums that for concrete sizes.
:func:`run_order` and :func:`file_order` convert between the order of nodes in a file and the order
in which onnxruntime runs them; :func:`order_for_memory` picks the better of two orders.
:func:`symbolic_peaks` gives peaks as sums over symbolic sizes. :class:`Arena` simulates
onnxruntime's CPU allocator, for the resident memory of a process.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import captured, subgraphs_of
from onnxtrain.graph.shapes import dims as D


def forward_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that compute the first output: the loss, or the output of a model."""
    return ancestors(graph.outputs[0]) if graph.outputs else set()


def ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value depends on."""
    seen: set[ir.Node] = set()
    pending = [value.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [x.producer() for x in (*node.inputs, *captured(node)) if x is not None]
    return seen


VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose result is their first input with another shape."""

_IN_PLACE = {
    "Cast": 0,
    "Clip": 0,
    "Elu": 0,
    "FusedConv": 3,
    "HardSigmoid": 0,
    "LeakyRelu": 0,
    "LogSoftmax": 0,
    "QuickGelu": 0,
    "Relu": 0,
    "Scatter": 0,
    "ScatterElements": 0,
    "Selu": 0,
    "Sigmoid": 0,
    "Softmax": 0,
    "Softplus": 0,
    "Softsign": 0,
    "Tanh": 0,
    "ThresholdedRelu": 0,
    "Trilu": 0,
}
"""The input whose buffer onnxruntime's CPU kernel may reuse for the result, after its last use."""


def is_view(node: ir.Node) -> bool:
    """Return whether a node's result shares the memory of its first input."""
    return node.domain == "" and node.op_type in VIEWS


def inplace_input(node: ir.Node) -> int | None:
    """Return the input whose memory a node may reuse for its first result."""
    return _IN_PLACE.get(node.op_type)


Size = Callable[[ir.Value], int]
SameShape = Callable[[ir.Value, ir.Value], bool]


@dataclasses.dataclass
class Event:
    """Memory that one node allocates and that is free after it, by the name of the owning value."""

    node: ir.Node
    new: dict[str, int]
    """Bytes of the results that need memory of their own."""
    free: list[str]
    """Results whose memory nothing reads after this node."""


def lifetimes(
    nodes: Sequence[ir.Node],
    size: Size,
    *,
    elsewhere: Collection[str] = (),
    same: SameShape | None = None,
) -> list[Event]:
    """Return what each node allocates and frees.

    Args:
        nodes: in the order in which they run.
        size: returns the bytes of a value.
        elsewhere: names of results that onnxruntime writes to memory allocated beforehand.
        same: returns whether the runtime knows that two values have the same size; by default
            whether the graph's shapes prove it.
    """
    same = same or _same_shape
    read = [[x for x in (*n.inputs, *captured(n)) if x is not None] for n in nodes]
    uses = Counter(x.name or "" for values in read for x in values)
    # The value that owns the memory a value lies in. Inputs and weights own theirs and are absent.
    owner: dict[str, str] = {}
    left: Counter[str] = Counter()  # remaining uses of all values in the memory of an owner
    events = []
    for node, values in zip(nodes, read, strict=True):
        event = Event(node, {}, [])
        for i, y in enumerate(node.outputs):
            name = y.name or ""
            if not name or name in elsewhere:
                continue
            memory = name if i else _memory_owner(node, y, owner, left, same)
            if memory is None:
                continue  # a view of an input or a weight
            owner[name] = memory
            left[memory] += uses[name]
            if memory == name:
                event.new[name] = size(y)
        for x in values:
            if (memory := owner.get(x.name or "")) is not None:
                left[memory] -= 1
        touched = dict.fromkeys(owner.get(x.name or "") for x in (*values, *node.outputs))
        event.free = [p for p in touched if p is not None and not left[p]]
        events.append(event)
    return events


def _memory_owner(
    node: ir.Node, y: ir.Value, owner: dict[str, str], left: Counter[str], same: SameShape
) -> str | None:
    """Return the owner of a first result's memory: itself, an earlier value, ``None`` for a weight.

    A view shares the memory of its input. An in-place operator takes it over after its last use.
    """
    inputs = node.inputs
    if is_view(node):
        return None if inputs[0] is None else owner.get(inputs[0].name or "")
    i = inplace_input(node)
    x = inputs[i] if i is not None and i < len(inputs) else None
    memory = None if x is None else owner.get(x.name or "")
    if x is not None and memory is not None and left[memory] == 1 and same(x, y):
        return memory
    return y.name


def _same_shape(x: ir.Value, y: ir.Value) -> bool:
    dims = S.dims_of(x)
    return (
        _bit_width(x) == _bit_width(y)
        and dims is not None
        and None not in dims
        and dims == S.dims_of(y)
    )


def _bit_width(x: ir.Value) -> int | None:
    return None if x.dtype is None else x.dtype.bitwidth


class Sizes:
    """Bytes of values at given symbolic sizes; call it with a value.

    Args:
        symbols: sizes by the name of the symbol.
        other: the size of every other symbol.
    """

    def __init__(self, symbols: Mapping[str, int] | None = None, other: int = 1) -> None:
        self._known: dict[str, D.Dim] = {D.symbol(n): v for n, v in (symbols or {}).items()}
        self._other = other
        self._cache: dict[tuple[D.Dim, ...], int | None] = {}
        self.unknown: set[str] = set()

    def elements(self, dims: Sequence[D.Dim]) -> int | None:
        """Return the number of elements of a shape, ``None`` if it is unknown."""
        key = tuple(dims)
        if key not in self._cache:
            sizes = D.static_sizes([self._size(d) for d in key])
            self._cache[key] = None if sizes is None else math.prod(sizes)
        return self._cache[key]

    def __call__(self, x: ir.Value) -> int:
        """Return the bytes of a value; record a value of unknown size and count it as zero."""
        dims = S.dims_of(x)
        count = None if dims is None else self.elements(dims)
        if count is None or x.dtype is None:
            self.unknown.add(x.name or "")
            return 0
        return math.ceil(count * x.dtype.bitwidth / 8)

    def _size(self, d: D.Dim) -> int | None:
        if not isinstance(d, str):
            return d
        values = {s: self._known.get(s, self._other) for s in D.symbols(d)}
        size = D.substitute(d, values)
        return max(size, 0) if isinstance(size, int) else None


def peak_bytes(nodes: Iterable[ir.Node], sizes: Sizes, elsewhere: Iterable[str] = ()) -> int:
    """Return the peak bytes of live results when nodes run in the given order."""
    current = peak = 0
    live: dict[str, int] = {}
    for event in lifetimes(list(nodes), sizes, elsewhere=set(elsewhere)):
        live.update(event.new)
        current += sum(event.new.values())
        peak = max(peak, current)
        current -= sum(live.pop(name) for name in event.free)
    return peak


def run_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the order in which onnxruntime runs nodes that are given in file order.

    onnxruntime walks depth-first from the nodes without readers to their sources, later in the file
    first, and runs a node after all its sources.
    """
    position = {node: i for i, node in enumerate(nodes)}
    sources = [_source_positions(node, position) for node in nodes]
    read = {i for row in sources for i in row}
    pending = [(i, False) for i in range(len(nodes)) if i not in read]
    entered: set[int] = set()
    order: list[ir.Node] = []
    while pending:
        i, done = pending.pop()
        if done:
            order.append(nodes[i])
        elif i not in entered:
            entered.add(i)
            pending.append((i, True))
            pending += [(j, False) for j in sources[i] if j not in entered]
    return order


def _source_positions(node: ir.Node, position: dict[ir.Node, int]) -> list[int]:
    values = (x for x in (*node.inputs, *captured(node)) if x is not None)
    return sorted({position[p] for x in values if (p := x.producer()) in position})


def file_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return a file order of nodes that makes onnxruntime run them in the given order.

    Inverts :func:`run_order`: among the nodes that could come next in the file, the one that should
    run last comes first, and the nodes without readers come at the end. The reverse sweep of
    autodiff emits nodes in a good order, each weight gradient right after its layer's input
    gradient and recomputed activations right where they are read. Written to a file in that order,
    onnxruntime would recompute too early and run the weight gradients last.
    """
    position = {node: i for i, node in enumerate(nodes)}
    waiting: list[int] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        sources = _source_positions(node, position)
        waiting.append(len(sources))
        for source in sources:
            readers[source].append(i)
    ready = [-i for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[ir.Node] = []
    ends: list[int] = []
    while ready:
        i = -heapq.heappop(ready)
        if readers[i]:
            order.append(nodes[i])
        else:
            ends.append(i)
        for reader in readers[i]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, -reader)
    order += [nodes[i] for i in sorted(ends, reverse=True)]
    assert len(order) == len(nodes)
    return order


_ASSUMED_SIZE = 32  # of every symbolic dimension, to compare two orders


def order_for_memory(graph: ir.Graph) -> None:
    """Reorder the nodes of a graph, in place, to lower the peak memory of a run in onnxruntime.

    Compares the peak of the graph's own order with that of :func:`file_order`, which makes
    onnxruntime follow it. `file_order` wins for layers without large matmuls. The graph's own order
    wins for convolutions: it gathers their im2col windows late.
    """
    original = list(graph)
    reordered = file_order(original)
    sizes = Sizes(other=_ASSUMED_SIZE)
    outputs = {y.name or "" for y in graph.outputs}
    peaks = [peak_bytes(run_order(nodes), sizes, outputs) for nodes in (original, reordered)]
    if peaks[1] < peaks[0]:
        graph.remove(original)
        graph.extend(reordered)


Terms = dict[str, int]
"""Bytes as a sum over products of symbolic sizes.

``{"": 64, "batch*length": 12}`` means ``64 + 12*batch*length``.
"""

_TRIED_SIZES = (1, 16, 128, 1024)  # of each symbol: all equal, or one of them larger than 1


def symbolic_peaks(graph: ir.Graph) -> list[Terms]:
    """Return the live bytes at the nodes where a graph may peak, as symbolic sums.

    Which node is the peak depends on the sizes. Each sum is valid for all sizes; the largest of
    them is the peak at the sizes tried here. Values of unknown size count as zero.
    """
    symbols = sorted({s for x in graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)})
    tried = [dict.fromkeys(symbols, n) for n in _TRIED_SIZES]
    tried += [
        {s: (n if s == own else 1) for s in symbols} for own in symbols for n in _TRIED_SIZES[1:]
    ]
    outputs = {y.name or "" for y in graph.outputs}
    unique: list[Terms] = []
    for terms in _peaks(run_order(list(graph)), tried, outputs):
        if terms and terms not in unique:
            unique.append(terms)
    return unique


def _peaks(
    nodes: Sequence[ir.Node], tried: Sequence[Mapping[str, int]], elsewhere: Iterable[str]
) -> list[Terms]:
    """Return the live bytes at the peak for each of the sizes tried."""
    terms = {y.name or "": _terms(y) for node in nodes for y in node.outputs}
    events = lifetimes(nodes, lambda x: 1, elsewhere=set(elsewhere))
    live: Counter[str] = Counter()
    peaks, peak_bytes = [Terms() for _ in tried], [0] * len(tried)
    grown = False  # evaluating terms is slow: do it only where more is live than before
    for event in events:
        for name in event.new:
            live.update(terms[name])
            grown = grown or bool(terms[name])
        in_body = _body_peak(event.node, tried)
        if grown or in_body:
            for i, sizes in enumerate(tried):
                total = live + Counter(in_body[i]) if in_body else live
                if (current := evaluate_terms(total, sizes)) > peak_bytes[i]:
                    peaks[i], peak_bytes[i] = dict(total), current
            grown = False
        for name in event.free:
            live.subtract(terms[name])
    return peaks


def _body_peak(node: ir.Node, tried: Sequence[Mapping[str, int]]) -> list[Terms]:
    """Return the peak of a node's largest body for each of the sizes tried; empty if no body."""
    bodies = [_peaks(list(g), tried, ()) for g in subgraphs_of(node)]
    if not bodies:
        return []
    return [
        max((body[i] for body in bodies), key=lambda terms: evaluate_terms(terms, sizes))
        for i, sizes in enumerate(tried)
    ]


def evaluate_terms(terms: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the bytes at the given symbolic sizes; a missing size counts as one."""
    return sum(
        count * math.prod(sizes.get(s, 1) for s in product.split("*")) if product else count
        for product, count in terms.items()
    )


def _terms(x: ir.Value) -> Terms:
    dims = S.dims_of(x)
    if dims is None or x.dtype is None:
        return {}
    count = D.product(dims)
    if count is None or (isinstance(count, str) and any(c in count for c in "(/-")):
        return {}
    width = x.dtype.bitwidth / 8
    terms: Counter[str] = Counter()
    for term in str(count).split(" + "):
        factors = term.split("*")
        coefficient = math.prod(int(f) for f in factors if f.isdigit())
        product = "*".join(f for f in factors if not f.isdigit())
        terms[product] += math.ceil(coefficient * width)
    return dict(terms)


_ALIGNMENT = 256
_PAGE = 4096
_TABLE_ENTRY_BYTES = 8  # bytes of a region's table for each unit of rounding
_FIRST_REGION = 1 << 20
_SECOND_REGION = 2 << 20
_MAX_REGION = 1 << 30  # regions stop growing here, unless one request needs more
_MAX_DEAD_BYTES = 128 << 20  # a chunk with a rest of this size is always split

_Chunk = tuple[int, int, int]  # size, region, offset


class Arena:
    """Simulation of onnxruntime's CPU arena that counts the pages a sequence of requests touches.

    The constants and rules are those of onnxruntime's BFCArena. A request is rounded up to 256
    bytes and served by the smallest free chunk that fits. A chunk is split if it is at least twice
    as large; free neighbors are merged. If no chunk fits, the arena allocates a new region, each
    twice as large as the last, and never returns it. The operating system counts only pages that
    were written to. So does :attr:`touched`, plus eight bytes of table for every 256 of a region.
    """

    def __init__(self) -> None:
        self._free: list[_Chunk] = []
        self._starts: dict[tuple[int, int], int] = {}  # free chunks: (region, offset) -> size
        self._ends: dict[tuple[int, int], int] = {}  # free chunks: (region, end) -> offset
        self._pages: list[np.ndarray] = []
        self._next = _FIRST_REGION
        self.in_use = 0
        self.peak_in_use = 0

    @property
    def touched(self) -> int:
        """Bytes of all pages written to so far, tables included."""
        written = sum(int(p.sum()) for p in self._pages) * _PAGE
        return written + sum(len(p) for p in self._pages) * _PAGE // _ALIGNMENT * _TABLE_ENTRY_BYTES

    def allocate(self, size: int) -> _Chunk:
        """Return a chunk for a request; its pages count as written."""
        wanted = max(-(-size // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        at = bisect.bisect_left(self._free, (wanted, -1, -1))
        if at == len(self._free):
            self._extend(wanted)
            at = bisect.bisect_left(self._free, (wanted, -1, -1))
        whole, region, offset = self._free.pop(at)
        self._forget(whole, region, offset)
        if whole >= 2 * wanted or whole - wanted >= _MAX_DEAD_BYTES:
            self._add(whole - wanted, region, offset + wanted)
            whole = wanted
        self._pages[region][offset // _PAGE : -(-(offset + size) // _PAGE)] = True
        self.in_use += whole
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return whole, region, offset

    def release(self, chunk: _Chunk) -> None:
        """Free a chunk and merge it with free neighbors."""
        size, region, offset = chunk
        self.in_use -= size
        after = self._starts.get((region, offset + size))
        if after is not None:
            self._take(after, region, offset + size)
            size += after
        before = self._ends.get((region, offset))
        if before is not None:
            length = offset - before
            self._take(length, region, before)
            offset, size = before, size + length
        self._add(size, region, offset)

    def _extend(self, wanted: int) -> None:
        first = not self._pages
        grown = self._next < wanted
        while self._next < wanted:
            self._next *= 2
        size = self._next
        self._pages.append(np.zeros(-(-size // _PAGE), np.bool_))
        self._add(size, len(self._pages) - 1, 0)
        if first:
            self._next = max(_SECOND_REGION, self._next)
        elif not grown:
            self._next = min(self._next * 2, max(_MAX_REGION, self._next))

    def _add(self, size: int, region: int, offset: int) -> None:
        bisect.insort(self._free, (size, region, offset))
        self._starts[region, offset] = size
        self._ends[region, offset + size] = offset

    def _take(self, size: int, region: int, offset: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size, region, offset))]
        self._forget(size, region, offset)

    def _forget(self, size: int, region: int, offset: int) -> None:
        del self._starts[region, offset]
        del self._ends[region, offset + size]
