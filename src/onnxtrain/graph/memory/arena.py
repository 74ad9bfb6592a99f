"""The arena of onnxruntime's CPU provider, simulated: which pages a sequence of requests touches.

Requests are rounded up to 256 bytes and served by the smallest free piece that is large enough. A
piece is split if it is at least twice as large, neighbours that are free are joined, and where none
fits, a new region is asked for, each twice as large as the last. Nothing is given back. The system
counts only what was written to, so that is what is counted here, and a table of eight bytes for
every 256 of a region.
"""

from __future__ import annotations

import bisect

import numpy as np

_ROUND = 256
_PAGE = 4096
_TABLE = 8  # bytes of a region's table for each unit of rounding
_FIRST = 1 << 20
_SECOND = 2 << 20
_MOST = 1 << 30  # regions do not grow beyond it, unless one request does
_WASTE = 128 << 20  # a rest of this size is always cut off

_Piece = tuple[int, int, int]  # size, region, offset


class Arena:
    """Serves requests, and counts the memory that was touched by them."""

    def __init__(self) -> None:
        self._free: list[_Piece] = []
        self._starts: dict[tuple[int, int], int] = {}  # free pieces: (region, offset) -> size
        self._ends: dict[tuple[int, int], int] = {}  # free pieces: (region, end) -> offset
        self._pages: list[np.ndarray] = []
        self._next = _FIRST
        self.in_use = 0
        self.most_in_use = 0

    @property
    def touched(self) -> int:
        """The bytes of all pages that were written to so far, tables included."""
        written = sum(int(p.sum()) for p in self._pages) * _PAGE
        return written + sum(len(p) for p in self._pages) * _PAGE // _ROUND * _TABLE

    def allocate(self, size: int) -> _Piece:
        """Return a piece of memory for a request, which counts as written."""
        wanted = max(-(-size // _ROUND) * _ROUND, _ROUND)
        at = bisect.bisect_left(self._free, (wanted, -1, -1))
        if at == len(self._free):
            self._extend(wanted)
            at = bisect.bisect_left(self._free, (wanted, -1, -1))
        whole, region, offset = self._free.pop(at)
        self._forget(whole, region, offset)
        if whole >= 2 * wanted or whole - wanted >= _WASTE:
            self._add(whole - wanted, region, offset + wanted)
            whole = wanted
        self._pages[region][offset // _PAGE : -(-(offset + size) // _PAGE)] = True
        self.in_use += whole
        self.most_in_use = max(self.most_in_use, self.in_use)
        return whole, region, offset

    def release(self, piece: _Piece) -> None:
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
            self._next = max(_SECOND, self._next)
        elif not grown:
            self._next = min(self._next * 2, max(_MOST, self._next))

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
