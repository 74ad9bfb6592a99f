"""Named tensors where the runtime reads and writes them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from onnxtrain.runtime import session as runtime

_ALIGNMENT = 64
_BFLOAT16 = 16  # TensorProto.BFLOAT16
_WORD = np.int64
_COUNTED = np.iinfo(np.int32).max


class Values(Mapping[str, Any]):
    """Tensors in one allocation, each aligned; ``values[name]`` is what the runtime takes.

    Args:
        arrays: what they hold at first.
        device: where they are to be.
        shared: whether arrays may see the same memory, so that nothing need be copied; on the CPU
            only.
        release: take each array out of ``arrays`` once it is copied.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        device: str,
        *,
        shared: bool | None = None,
        release: bool = False,
    ) -> None:
        self._device = device
        self._shared = device == "cpu" if shared is None else shared
        self._arrays, self._raw = _arena(arrays, release=release)
        first = self._raw.ctypes.data
        self._at = {n: a.ctypes.data - first for n, a in self._arrays.items()}
        self._copies: dict[tuple[str, ...], tuple[Values, list[tuple[Any, Any]]]] = {}
        if self._shared:
            self._values = {n: ort_value(a) for n, a in self._arrays.items()}
        else:
            host = self._arrays
            self._memory: Any = _copied(self._raw, device)
            self._arrays = {n: np.broadcast_to(a.dtype.type(0), a.shape) for n, a in host.items()}
            self._raw = np.empty(0, np.uint8)
            self._values = {n: self._window(self._at[n], a) for n, a in self._arrays.items()}

    def __del__(self) -> None:
        """Give memory of a device back."""
        if getattr(self, "_memory", None) is not None and not sys.is_finalizing():
            self._values, self._copies, self._memory = {}, {}, None
            _room(0, self._device)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def view(self, name: str) -> np.ndarray:
        """Return a tensor without a copy, if that can be done; it changes with the next step."""
        if self._shared:
            return self._arrays[name]
        like = self._arrays[name]
        return self._values[name].numpy().view(like.dtype).reshape(like.shape)

    def line(self, names: Sequence[str]) -> np.ndarray:
        """Return tensors of one type as one vector, with the gaps between them; on the CPU only.

        Args:
            names: of neighbours, in the order in which they were given.
        """
        assert self._shared
        start, end = self._range(names)
        return self._raw[start:end].view(self._arrays[names[0]].dtype)

    def length(self, names: Sequence[str]) -> int:
        """Return the number of elements of neighbours as one vector, gaps among them."""
        start, end = self._range(names)
        return (end - start) // self._arrays[names[0]].itemsize

    def line_value(self, names: Sequence[str], first: int = 0, count: int | None = None) -> Any:
        """Return what the runtime takes for a part of neighbours as one vector, on a device."""
        kind = self._arrays[names[0]].dtype
        count = self.length(names) - first if count is None else count
        at = self._range(names)[0] + first * kind.itemsize
        return self._window(at, np.broadcast_to(kind.type(0), (count,)))

    def _range(self, names: Sequence[str]) -> tuple[int, int]:
        last = self._arrays[names[-1]]
        return self._at[names[0]], self._at[names[-1]] + last.size * last.itemsize

    def _window(self, at: int, like: np.ndarray) -> Any:
        """Return a value in the memory of the device, without memory of its own."""
        binding = _window_session().io_binding()
        kind = _BFLOAT16 if like.dtype == ml_dtypes.bfloat16 else like.dtype.type
        address = self._memory.data_ptr() + at
        binding.bind_output("y", self._device, 0, kind, like.shape, address)
        return binding.get_outputs()[0]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor; shape and type are the caller's business."""
        if self._shared:
            self._arrays[name][...] = array
        else:
            self._values[name].update_inplace(np.ascontiguousarray(array))

    def copy_from(self, other: Values, names: list[str]) -> None:
        """Set some tensors to those of another set; neighbours in both are one copy on a device."""
        if self._shared:
            for name in names:
                self.write(name, other.view(name))
            return
        key = tuple(names)
        if key not in self._copies or self._copies[key][0] is not other:
            self._copies[key] = other, self._windows(other, names)
        for to, source in self._copies[key][1]:
            to.update_inplace(source)

    def _windows(self, other: Values, names: list[str]) -> list[tuple[Any, Any]]:
        """Return pairs of windows of bytes, of this and of another set, for runs of neighbours."""
        runs: list[list[str]] = []
        for name in sorted(names, key=self._at.__getitem__):
            last = runs[-1][-1] if runs else name
            apart = self._at[name] - self._at[last], other._at[name] - other._at[last]
            gap = apart[0] - self._arrays[last].nbytes
            if runs and apart[0] == apart[1] and gap < _ALIGNMENT:
                runs[-1].append(name)
            else:
                runs.append([name])
        pairs = []
        for run in runs:
            start, end = self._range(run)
            whole = np.broadcast_to(np.uint8(0), (end - start,))
            pairs.append((self._window(start, whole), other._window(other._at[run[0]], whole)))
        return pairs


def ort_value(array: np.ndarray, device: str = "cpu") -> Any:
    """Return an OrtValue; on the CPU it is the array's own memory."""
    kind = runtime.runtime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return kind.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return kind.ortvalue_from_numpy(array, device, 0)


def _copied(raw: np.ndarray, device: str) -> Any:
    """Return bytes in memory of a device, in a block of just their size.

    A value that is made of an array gets a block of the next power of two; a result of a session
    does not.
    """
    words = raw.view(_WORD)
    value = _room(words.size, device)
    value.update_inplace(words)
    return value


def _room(words: int, device: str) -> Any:
    """Return so many words of a device; what is not in use any more is given back.

    Kernels count their elements in 32 bits; a longer vector is not made by one.
    """
    if words > _COUNTED:
        kind = runtime.runtime().OrtValue
        return kind.ortvalue_from_shape_and_type([words], _WORD, device, 0)
    session = _room_session(device)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.array([words], np.int64))
    binding.bind_output("y", device)
    options = None if device == "cpu" else runtime.giving_memory_back()
    runtime.run_bound(session, binding, options)
    return binding.get_outputs()[0]


@functools.cache
def _room_session(device: str) -> Any:
    """Return a session whose result is a vector of words, as long as its input says."""
    return _one_node("ConstantOfShape", onnx.TensorProto.INT64, onnx.TensorProto.INT64, device)


@functools.cache
def _window_session() -> Any:
    """Return a session for the one way to say where a value lies: as the place of an output."""
    return _one_node("Identity", onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, "cpu")


def _one_node(op_type: str, takes: int, gives: int, device: str) -> Any:
    node = onnx.NodeProto(op_type=op_type, input=["x"], output=["y"])
    if op_type == "ConstantOfShape":
        zero = onnx.TensorProto(dims=[1], data_type=gives, raw_data=bytes(_WORD().itemsize))
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=zero)
    x, y = (onnx.ValueInfoProto(name=n) for n in "xy")
    x.type.tensor_type.elem_type, y.type.tensor_type.elem_type = takes, gives
    graph = onnx.GraphProto(name="memory", node=[node], input=[x], output=[y])
    opsets = [onnx.OperatorSetIdProto(version=21)]
    model = onnx.ModelProto(graph=graph, opset_import=opsets, ir_version=10)
    return runtime.create(model.SerializeToString(), device=device, threads=1)


def _arena(
    like: dict[str, np.ndarray], *, release: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    offsets, end = {}, 0
    for name, array in like.items():
        offsets[name] = end
        end += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    whole = np.zeros(end + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    raw = whole[start : start + end]
    views = {}
    for name, at in offsets.items():
        array = like.pop(name) if release else like[name]
        view = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        views[name] = view
    return views, raw
