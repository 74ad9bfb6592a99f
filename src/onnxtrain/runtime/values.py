"""Named tensors where the runtime reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.runtime import session as runtime

_ALIGNMENT = 64
_BFLOAT16 = 16  # TensorProto.BFLOAT16


class Values(Mapping[str, Any]):
    """Tensors in one allocation, each aligned; ``values[name]`` is what the runtime takes."""

    def __init__(self, arrays: Mapping[str, np.ndarray], device: str) -> None:
        self._arrays, self._raw = _arena(arrays)
        self._values = {n: ort_value(a, device) for n, a in self._arrays.items()}
        # On the CPU both sides see the same memory, so nothing need be copied.
        self._shared = device == "cpu" and all(
            v.data_ptr() == self._arrays[n].ctypes.data
            for n, v in self._values.items()
            if self._arrays[n].size
        )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def view(self, name: str) -> np.ndarray:
        """Give a tensor without copying it, if that can be done; it changes with the next step."""
        if self._shared:
            return self._arrays[name]
        like = self._arrays[name]
        return self._values[name].numpy().view(like.dtype).reshape(like.shape)

    def line(self, names: Sequence[str]) -> np.ndarray:
        """Give tensors of one type as one vector, with the gaps between them; on the CPU only.

        Args:
            names: of neighbours, in the order in which they were given.
        """
        assert self._shared
        first, last = self._arrays[names[0]], self._arrays[names[-1]]
        start = first.ctypes.data - self._raw.ctypes.data
        end = last.ctypes.data + last.nbytes - self._raw.ctypes.data
        return self._raw[start:end].view(first.dtype)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor; shape and type are the caller's business."""
        if self._shared:
            self._arrays[name][...] = array
        else:
            self._values[name].update_inplace(np.ascontiguousarray(array))

    def copy_from(self, other: Values, names: list[str]) -> None:
        """Set some tensors to those of another set."""
        for name in names:
            if self._shared:
                self.write(name, other.view(name))
            else:  # from memory of the device to memory of the device
                self._values[name].update_inplace(other[name])


def ort_value(array: np.ndarray, device: str = "cpu") -> Any:
    """Give an OrtValue; on the CPU it is the array's own memory."""
    kind = runtime.runtime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return kind.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return kind.ortvalue_from_numpy(array, device, 0)


def _arena(like: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    offsets, end = {}, 0
    for name, array in like.items():
        offsets[name] = end
        end += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    raw = np.zeros(end + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    views = {}
    for name, array in like.items():
        at = start + offsets[name]
        view = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        views[name] = view
    return views, raw
