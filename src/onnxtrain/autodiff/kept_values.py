"""What a block that is computed again keeps: the fewest bytes that the rest follows from cheaply.

The backward pass wants some values of a block. Each is kept, or made again of values that are there
themselves. Keeping costs the bytes of a value. Making it again costs a share of the bytes that its
node reads: a mean, or a product with a narrow matrix, is kept, being small beside what it is made
of; a sum or an activation is not. What must not run twice, or has no copy, costs without bound.

That is a cut of least weight: ``start -> made -> there -> end``, with an edge ``start -> made`` for
making a value again, ``made -> there`` for keeping it, ``there -> made`` from what a node reads to
its results, and ``there -> end`` for what is wanted. Of several such cuts the one nearest to the
wanted values is taken: it computes the least again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from onnxtrain.graph.memory import Sizes
from onnxtrain.graph.nodes import is_op

READ_AGAIN = 16
"""So many bytes are read again rather than one kept."""
_SYMBOL = 256  # what a symbolic size counts as
_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_START, _END = 0, 1


def kept_values(
    block: Sequence[ir.Node],
    wanted: Collection[ir.Value],
    inner: Collection[ir.Value],
    may_copy: Callable[[ir.Node], bool],
) -> set[ir.Value]:
    """Return the values of a block to keep.

    Args:
        block: its nodes, in order.
        wanted: the values that the backward pass reads.
        inner: the values of the block that are not kept anyway.
        may_copy: whether a node may run again.
    """
    sizes = Sizes(other=_SYMBOL)
    values = _needed(block, wanted, inner)
    place = {y: 2 + 2 * i for i, y in enumerate(values)}
    flow = _Flow(2 + 2 * len(values))
    for y, made in place.items():
        node = y.producer()
        assert node is not None
        sources = dict.fromkeys(x for x in node.inputs if x is not None)
        again = math.inf
        if may_copy(node):
            again = max((sizes(x) for x in sources), default=0) / READ_AGAIN
        flow.edge(_START, made, again)
        flow.edge(made, made + 1, sizes(y) or 1)
        for x in sources:
            if x in place:
                flow.edge(place[x] + 1, made, math.inf)
        if y in wanted:
            flow.edge(made + 1, _END, math.inf)
    there = flow.before_end()
    chosen = [y for y, made in place.items() if made not in there and made + 1 in there]
    return {_unmoved(y, place) for y in chosen}


def _unmoved(y: ir.Value, inner: Collection[ir.Value]) -> ir.Value:
    """Return what a value is before it was moved: both passes may want it in forms of their own."""
    node = y.producer()
    x = node.inputs[0] if node is not None and is_op(node, *_MOVES) else None
    return y if x is None or x not in inner else _unmoved(x, inner)


def _needed(
    block: Sequence[ir.Node], wanted: Collection[ir.Value], inner: Collection[ir.Value]
) -> list[ir.Value]:
    """Return the values that wanted ones may have to be made of."""
    needed = {x for x in wanted if x in inner}
    chosen: list[ir.Value] = []
    for node in reversed(block):
        outputs = [y for y in node.outputs if y in needed]
        if outputs:
            chosen += outputs
            needed.update(x for x in node.inputs if x is not None and x in inner)
    return chosen[::-1]


class _Flow:
    """A network of numbered places, whose greatest flow from start to end gives the least cut."""

    def __init__(self, places: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(places)]
        self._to: list[int] = []
        self._room: list[float] = []

    def edge(self, a: int, b: int, room: float) -> None:
        """Add an edge; its partner, with the next number, goes back."""
        for x, y, r in ((a, b, room), (b, a, 0.0)):
            self._edges[x].append(len(self._to))
            self._to.append(y)
            self._room.append(r)

    def before_end(self) -> set[int]:
        """Return the places from which the end is still reached when the flow is greatest."""
        while path := self._path():
            amount = min(self._room[e] for e in path)
            for e in path:
                self._room[e] -= amount
                self._room[e ^ 1] += amount
        return set(self._steps(_END, back=True))

    def _path(self) -> list[int]:
        """Return a shortest way with room on it, as edges."""
        came = self._steps(_START, back=False)
        path, at = [], _END
        while at in came and at != _START:
            path.append(came[at])
            at = self._to[came[at] ^ 1]
        return path

    def _steps(self, first: int, *, back: bool) -> dict[int, int]:
        """Return the places reached along edges with room, with the edge that led to each."""
        came, pending = {first: -1}, deque([first])
        while pending:
            at = pending.popleft()
            for e in self._edges[at]:
                if self._room[e ^ 1 if back else e] > 0 and self._to[e] not in came:
                    came[self._to[e]] = e
                    pending.append(self._to[e])
        return came
