"""The arena of onnxruntime's CPU provider, simulated: which pages a sequence of requests touches.

Requests are rounded up to 256 bytes and served by the smallest free piece that is large enough. A
piece is split if it is at least twice as large, neighbours that are free are joined, and where none
fits, a new region is asked for, each twice as large as the last. Nothing is given back. The system
counts only what was written to, so that is what is counted here, and a table of eight bytes for
every 256 of a region.

The order of nodes in a file that needs the least memory, of those that are worth a try.

The nodes that a value is made by: of the first output of a training graph, the forward pass.

From when until when each result of a graph needs memory.

The most memory that the results of a graph take at a time.

Which operators of onnxruntime's CPU kernels need no new memory for their result.

The order in which onnxruntime runs the nodes of a file.

The most memory that results take at a time, as sums over symbolic sizes.

Where the most is held depends on the sizes. So the sums of several places are kept: each holds at
any sizes, and the largest of them is the peak at those that were tried.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import captured, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.dead_code import file_order

_ALIGNMENT = 256
_PAGE = 4096
_TABLE_ENTRY_BYTES = 8  # bytes of a region's table for each unit of rounding
_FIRST_REGION = 1 << 20
_SECOND_REGION = 2 << 20
_MAX_REGION = 1 << 30  # regions do not grow beyond it, unless one request does
_MAX_DEAD_BYTES = 128 << 20  # a rest of this size is always cut off

_Chunk = tuple[int, int, int]  # size, region, offset


class Arena:
    """Serves requests, and counts the memory that was touched by them."""

    def __init__(self) -> None:
        self._free: list[_Chunk] = []
        self._starts: dict[tuple[int, int], int] = {}  # free pieces: (region, offset) -> size
        self._ends: dict[tuple[int, int], int] = {}  # free pieces: (region, end) -> offset
        self._pages: list[np.ndarray] = []
        self._next = _FIRST_REGION
        self.in_use = 0
        self.peak_in_use = 0

    @property
    def touched(self) -> int:
        """The bytes of all pages that were written to so far, tables included."""
        written = sum(int(p.sum()) for p in self._pages) * _PAGE
        return written + sum(len(p) for p in self._pages) * _PAGE // _ALIGNMENT * _TABLE_ENTRY_BYTES

    def allocate(self, size: int) -> _Chunk:
        """Return a piece of memory for a request, which counts as written."""
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

    def release(self, piece: _Chunk) -> None:
        """Take back a piece, and join it with free neighbours."""
        size, region, offset = piece
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


def forward_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes behind the first output, which is the loss, or what the model gives."""
    return ancestors(graph.outputs[0]) if graph.outputs else set()


def ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value is made by."""
    seen: set[ir.Node] = set()
    pending = [value.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [x.producer() for x in (*node.inputs, *captured(node)) if x is not None]
    return seen


VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Their result is their first input with another shape."""

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
"""The input whose memory the result may take, if nobody else reads it any more."""


def is_view(node: ir.Node) -> bool:
    """Return whether a node's result is its first input's memory."""
    return node.domain == "" and node.op_type in VIEWS


def inplace_input(node: ir.Node) -> int | None:
    """Return the input whose memory a node may give to its first result."""
    return _IN_PLACE.get(node.op_type)


Size = Callable[[ir.Value], int]
SameShape = Callable[[ir.Value, ir.Value], bool]


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
    same: SameShape | None = None,
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
            place = name if i else _memory_owner(node, y, home, left, same)
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


def _memory_owner(
    node: ir.Node, y: ir.Value, home: dict[str, str], left: Counter[str], same: SameShape
) -> str | None:
    """Return whose memory a first result gets: its own, that of a source, or none of ours."""
    inputs = node.inputs
    if is_view(node):
        return None if inputs[0] is None else home.get(inputs[0].name or "")
    i = inplace_input(node)
    x = inputs[i] if i is not None and i < len(inputs) else None
    place = None if x is None else home.get(x.name or "")
    if x is not None and place is not None and left[place] == 1 and same(x, y):
        return place
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
    """Bytes of values at some numbers for symbolic sizes.

    Args:
        symbols: numbers by name of the symbol.
        other: what every other symbol counts as.
    """

    def __init__(self, symbols: Mapping[str, int] | None = None, other: int = 1) -> None:
        self._known: dict[str, D.Dim] = {D.symbol(n): v for n, v in (symbols or {}).items()}
        self._other = other
        self._cache: dict[tuple[D.Dim, ...], int | None] = {}
        self.unknown: set[str] = set()

    def elements(self, dims: Sequence[D.Dim]) -> int | None:
        """Return how many elements a shape has, if that can be told."""
        key = tuple(dims)
        if key not in self._cache:
            numbers = [self._number(d) for d in key]
            known = [n for n in numbers if n is not None]
            self._cache[key] = math.prod(known) if len(known) == len(numbers) else None
        return self._cache[key]

    def __call__(self, x: ir.Value) -> int:
        """Return the bytes of a value; those of unknown size count as nothing and are recorded."""
        dims = S.dims_of(x)
        count = None if dims is None else self.elements(dims)
        if count is None or x.dtype is None:
            self.unknown.add(x.name or "")
            return 0
        return math.ceil(count * x.dtype.bitwidth / 8)

    def _number(self, d: D.Dim) -> int | None:
        if not isinstance(d, str):
            return d
        values = {s: self._known.get(s, self._other) for s in D.symbols(d)}
        number = D.substitute(d, values)
        return max(number, 0) if isinstance(number, int) else None


def peak_bytes(nodes: Iterable[ir.Node], sizes: Sizes, elsewhere: Iterable[str] = ()) -> int:
    """Return the most bytes that results take at a time when nodes run in the given order."""
    now = most = 0
    held: dict[str, int] = {}
    for event in lifetimes(list(nodes), sizes, elsewhere=set(elsewhere)):
        held.update(event.new)
        now += sum(event.new.values())
        most = max(most, now)
        now -= sum(held.pop(name) for name in event.free)
    return most


def run_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return nodes, which are in the order of a file, in the order in which they run.

    The walk starts at the nodes that nothing reads and goes up to what they read, of several to the
    one that is last in the file first; a node runs when all that it reads has run.
    """
    place = {node: i for i, node in enumerate(nodes)}
    sources = [_sources(node, place) for node in nodes]
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


def _sources(node: ir.Node, place: dict[ir.Node, int]) -> list[int]:
    values = (x for x in (*node.inputs, *captured(node)) if x is not None)
    return sorted({place[p] for x in values if (p := x.producer()) in place})


_ASSUMED_SIZE = 32  # what a symbolic size counts as


def order_for_memory(graph: ir.Graph) -> None:
    """Reorder the nodes of a graph, in place, so that onnxruntime needs little memory to run it.

    Two orders are compared by the most memory that results take at a time: the graph's own, and the
    one that makes onnxruntime follow it. Layers without large products, whose weights' gradients
    may wait, want the second; of convolutions, the first lets windows be gathered late.
    """
    own = list(graph)
    other = file_order(own)
    sizes = Sizes(other=_ASSUMED_SIZE)
    outputs = {y.name or "" for y in graph.outputs}
    first, second = (peak_bytes(run_order(nodes), sizes, outputs) for nodes in (own, other))
    if second < first:
        graph.remove(own)
        graph.extend(other)


Terms = dict[str, int]
"""Bytes by the sizes that they are multiplied by: ``{"": 64, "batch*length": 12}``."""

_TRIED_SIZES = (1, 16, 128, 1024)


def symbolic_peaks(graph: ir.Graph) -> list[Terms]:
    """Return what is held at the places where a graph holds most, for small and large sizes.

    Values of unknown size count as nothing.
    """
    symbols = sorted({s for x in graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)})
    tried = [dict.fromkeys(symbols, n) for n in _TRIED_SIZES]
    tried += [
        {s: (n if s == own else 1) for s in symbols} for own in symbols for n in _TRIED_SIZES[1:]
    ]
    elsewhere = {y.name or "" for y in graph.outputs}
    peaks = _peaks(run_order(list(graph)), tried, elsewhere)
    unique: list[Terms] = []
    for terms in peaks:
        if terms and terms not in unique:
            unique.append(terms)
    return unique


def _peaks(
    nodes: Sequence[ir.Node], tried: Sequence[Mapping[str, int]], elsewhere: Iterable[str]
) -> list[Terms]:
    """Return what is held at the peak for each of the sizes tried."""
    known = {y.name or "": _terms(y) for node in nodes for y in node.outputs}
    events = lifetimes(nodes, lambda x: 1, elsewhere=set(elsewhere))
    held: Counter[str] = Counter()
    best, most = [Terms() for _ in tried], [0] * len(tried)
    grown = False
    for event in events:
        for name in event.new:
            held.update(known[name])
            grown = grown or bool(known[name])
        inside = _body_peak(event.node, tried)
        if grown or inside:
            for i, sizes in enumerate(tried):
                own = held + Counter(inside[i]) if inside else held
                if (now := evaluate_terms(own, sizes)) > most[i]:
                    best[i], most[i] = dict(own), now
            grown = False
        for name in event.free:
            held.subtract(known[name])
    return best


def _body_peak(node: ir.Node, tried: Sequence[Mapping[str, int]]) -> list[Terms]:
    """Return the peak of the largest of a node's bodies, if it has any."""
    bodies = [_peaks(list(g), tried, ()) for g in subgraphs_of(node)]
    if not bodies:
        return []
    return [
        max((body[i] for body in bodies), key=lambda terms: evaluate_terms(terms, sizes))
        for i, sizes in enumerate(tried)
    ]


def evaluate_terms(terms: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the bytes at numbers for symbolic sizes; sizes that have none count as one."""
    return sum(
        count * math.prod(sizes.get(s, 1) for s in product.split("*")) if product else count
        for product, count in terms.items()
    )


def _terms(x: ir.Value) -> Terms:
    dims = S.dims_of(x)
    if dims is None or x.dtype is None:
        return {}
    count = D.mul(1, 1)
    for d in dims:
        count = D.mul(count, d)
    if count is None or (isinstance(count, str) and any(c in count for c in "(/-")):
        return {}
    width = x.dtype.bitwidth / 8
    terms: Counter[str] = Counter()
    for term in str(count).split(" + "):
        factors = term.split("*")
        numbers = [int(f) for f in factors if f.isdigit()]
        product = "*".join(f for f in factors if not f.isdigit())
        terms[product] += math.ceil(math.prod(numbers) * width)
    return dict(terms)
