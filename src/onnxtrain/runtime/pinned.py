"""Memory of the host that an NVIDIA GPU reads by itself, for batches on their way to it.

What the system may move elsewhere, the driver copies through a buffer of its own, on one thread,
before the GPU reads it. Several threads copy a large batch to memory that stays in half that time.
The library that gives such memory is the one that onnxruntime's CUDA provider has loaded; without
it, or with few cores, batches go the driver's way.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain import thresholds as T
from onnxtrain.runtime.thread_pool import cores

_MAPS = Path("/proc/self/maps")
_PORTABLE = 1  # memory for all devices, whichever is the current one
_THREADS = 4


class Staging:
    """A place for batches of one shape and type.

    Args:
        array: has the shape and the type.
        address: of memory that stays, and is given back with this object.
        library: gave it.
    """

    def __init__(self, array: np.ndarray, address: int, library: Any) -> None:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(address))
        self._place = memory.view(array.dtype).reshape(array.shape)
        weakref.finalize(self, library.cudaFreeHost, ctypes.c_void_p(address)).atexit = False

    def fits(self, array: np.ndarray) -> bool:
        """Return whether a batch can be put here."""
        return array.shape == self._place.shape and array.dtype == self._place.dtype

    def filled(self, array: np.ndarray) -> np.ndarray:
        """Return a batch's copy, valid until the next one."""
        to, source = self._place.reshape(-1), array.reshape(-1)
        size = -(-to.size // _THREADS)
        parts = [slice(i * size, (i + 1) * size) for i in range(_THREADS)]
        list(_pool().map(lambda part: np.copyto(to[part], source[part]), parts))
        return self._place


def staging_for(array: np.ndarray) -> Staging | None:
    """Return a place for batches like this one, where that is faster and can be had."""
    if array.nbytes < T.STAGED_BATCH_BYTES or cores() < 2 * _THREADS:
        return None
    library = cuda_library()
    if library is None:
        return None
    address = ctypes.c_void_p()
    failed = library.cudaHostAlloc(
        ctypes.byref(address), ctypes.c_size_t(array.nbytes), ctypes.c_uint(_PORTABLE)
    )
    if failed or not address.value:
        library.cudaGetLastError()  # or the next kernel would report it as its own
        return None
    return Staging(array, address.value, library)


@functools.cache
def cuda_library() -> Any:
    """Return the CUDA runtime that this process has loaded, or ``None``."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    for path in dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "libcudart" in line):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "onnxtrain-batch")


__all__ = ["Staging", "cuda_library", "staging_for"]
