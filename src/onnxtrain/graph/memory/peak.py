"""The most memory that the results of a graph take at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.memory.lifetimes import lifetimes
from onnxtrain.graph.shapes import dims as D


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


def peak_of(nodes: Iterable[ir.Node], sizes: Sizes, elsewhere: Iterable[str] = ()) -> int:
    """Return the most bytes that results take at a time when nodes run in the given order."""
    now = most = 0
    held: dict[str, int] = {}
    for event in lifetimes(list(nodes), sizes, elsewhere=set(elsewhere)):
        held.update(event.new)
        now += sum(event.new.values())
        most = max(most, now)
        now -= sum(held.pop(name) for name in event.free)
    return most
