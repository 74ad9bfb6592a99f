"""Flat, aligned memory for everything that changes from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

_ALIGNMENT = 64


class Arena(Mapping[str, np.ndarray]):
    """Named arrays in one allocation, each aligned to a cache line."""

    def __init__(self, like: Mapping[str, np.ndarray]) -> None:
        offsets, end = {}, 0
        for name, array in like.items():
            offsets[name] = end
            end += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        raw = np.zeros(end + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self._views = {}
        for name, array in like.items():
            at = start + offsets[name]
            view = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            self._views[name] = view

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
