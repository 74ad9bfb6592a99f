"""The most memory that results take at a time, as sums over symbolic sizes.

Where the most is held depends on the sizes. So the sums of several places are kept: each holds at
any sizes, and the largest of them is the peak at those that were tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.memory.lifetimes import lifetimes
from onnxtrain.graph.memory.run_order import run_order
from onnxtrain.graph.shapes import dims as D

Terms = dict[str, int]
"""Bytes by the sizes that they are multiplied by: ``{"": 64, "batch*length": 12}``."""

_TRIED = (1, 16, 128, 1024)


def symbolic_peaks(graph: ir.Graph) -> list[Terms]:
    """Return what is held at the places where a graph holds most, for small and large sizes.

    Values of unknown size count as nothing.
    """
    symbols = sorted({s for x in graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)})
    tried = [dict.fromkeys(symbols, n) for n in _TRIED]
    tried += [{s: (n if s == own else 1) for s in symbols} for own in symbols for n in _TRIED[1:]]
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
        inside = _inside(event.node, tried)
        if grown or inside:
            for i, sizes in enumerate(tried):
                own = held + Counter(inside[i]) if inside else held
                if (now := total(own, sizes)) > most[i]:
                    best[i], most[i] = dict(own), now
            grown = False
        for name in event.free:
            held.subtract(known[name])
    return best


def _inside(node: ir.Node, tried: Sequence[Mapping[str, int]]) -> list[Terms]:
    """Return the peak of the largest of a node's bodies, if it has any."""
    bodies = [_peaks(list(g), tried, ()) for g in subgraphs_of(node)]
    if not bodies:
        return []
    return [
        max((body[i] for body in bodies), key=lambda terms: total(terms, sizes))
        for i, sizes in enumerate(tried)
    ]


def total(terms: Mapping[str, int], sizes: Mapping[str, int]) -> int:
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


__all__ = ["Terms", "symbolic_peaks", "total"]
