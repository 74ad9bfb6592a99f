"""Named tensors where the runtime reads and writes them.

How batches reach the memory that a session reads, and how results come back.

Memory of the host that an NVIDIA GPU reads by itself, for batches on their way to it.

What the system may move elsewhere, the driver copies through a buffer of its own, on one thread,
before the GPU reads it. Several threads copy a large batch to memory that stays in half that time.
The library that gives such memory is the one that onnxruntime's CUDA provider has loaded; without
it, or with few cores, batches go the driver's way.

Files of adapters, as onnxruntime itself writes and reads them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx

from onnxtrain import thresholds as T
from onnxtrain.errors import SaveError
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.session import import_onnxruntime
from onnxtrain.runtime.thread_pool import available_cores

_ALIGNMENT = 64
_BFLOAT16 = 16  # TensorProto.BFLOAT16
_WORD = np.int64
_MAX_ELEMENTS = np.iinfo(np.int32).max


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
            self._memory: Any = _device_copy(self._raw, device)
            self._arrays = {n: np.broadcast_to(a.dtype.type(0), a.shape) for n, a in host.items()}
            self._raw = np.empty(0, np.uint8)
            self._values = {n: self._window(self._at[n], a) for n, a in self._arrays.items()}

    def __del__(self) -> None:
        """Give memory of a device back."""
        if getattr(self, "_memory", None) is not None and not sys.is_finalizing():
            self._values, self._copies, self._memory = {}, {}, None
            _device_buffer(0, self._device)

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
    kind = runtime.import_onnxruntime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return kind.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return kind.ortvalue_from_numpy(array, device, 0)


def _device_copy(raw: np.ndarray, device: str) -> Any:
    """Return bytes in memory of a device, in a block of just their size.

    A value that is made of an array gets a block of the next power of two; a result of a session
    does not.
    """
    words = raw.view(_WORD)
    value = _device_buffer(words.size, device)
    value.update_inplace(words)
    return value


def _device_buffer(words: int, device: str) -> Any:
    """Return so many words of a device; what is not in use any more is given back.

    Kernels count their elements in 32 bits; a longer vector is not made by one.
    """
    if words > _MAX_ELEMENTS:
        kind = runtime.import_onnxruntime().OrtValue
        return kind.ortvalue_from_shape_and_type([words], _WORD, device, 0)
    session = _allocation_session(device)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.array([words], np.int64))
    binding.bind_output("y", device)
    options = None if device == "cpu" else runtime.shrink_arena_options()
    runtime.run_bound(session, binding, options)
    return binding.get_outputs()[0]


@functools.cache
def _allocation_session(device: str) -> Any:
    """Return a session whose result is a vector of words, as long as its input says."""
    return _single_node_session(
        "ConstantOfShape", onnx.TensorProto.INT64, onnx.TensorProto.INT64, device
    )


@functools.cache
def _window_session() -> Any:
    """Return a session for the one way to say where a value lies: as the place of an output."""
    return _single_node_session("Identity", onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, "cpu")


def _single_node_session(op_type: str, takes: int, gives: int, device: str) -> Any:
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
    if array.nbytes < T.STAGED_BATCH_BYTES or available_cores() < 2 * _THREADS:
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


CONTROL = ("lr", "step", "rng", "grad_scale", "reset")
"""Roles of the small inputs that a trainer sets by itself."""

Buffer = tuple[Any, Callable[[], np.ndarray]]
"""What the runtime writes a result to, and what reads it from there."""


class Memory(Protocol):
    """The part of a binding that depends on where a session runs."""

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind what is bound once, before the first batch."""
        ...

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bring one input of a batch."""
        ...

    def place(self, t: TensorSpec) -> Buffer | None:
        """Return a place for a result that is the same in every run, if it is to have one."""
        ...


class HostMemory:
    """The memory of the CPU: arrays of the caller are read where they are."""

    def __init__(self) -> None:
        self._small: dict[str, np.ndarray] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Give learning rate, step and the like a place that is written at each run."""
        for t in spec.inputs_of(*CONTROL):
            array = np.zeros(_sizes(t), numpy_dtype(t.dtype))
            self._small[t.name] = array
            binding.bind_ortvalue_input(t.name, ort_value(array))

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bind an array as it is, or copy it if it is small."""
        if name in self._small:
            self._small[name][...] = array
        elif array.dtype == ml_dtypes.bfloat16:
            binding.bind_ortvalue_input(name, ort_value(array))
        else:  # the same memory at a fifth of the price; the binding holds the array
            binding.bind_cpu_input(name, array)

    def place(self, t: TensorSpec) -> Buffer | None:
        """Keep a place for losses and metrics; all else comes in memory of its own."""
        if t.shape or t.role not in ("loss", "metric"):
            return None
        array = np.zeros((), numpy_dtype(t.dtype))
        return ort_value(array), lambda: np.array(array)


class DeviceMemory:
    """Memory of a device: batches are copied there, to addresses that stay.

    Args:
        device: where the session runs.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._fed: dict[str, tuple[np.ndarray, Any]] = {}
        self._staging: dict[str, Staging | None] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind nothing: an input gets its place when it comes first."""

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Copy an array to where it was last time; a new shape gets a new place."""
        known = self._fed.get(name)
        if known is None or known[0].shape != array.shape:
            own = np.array(array)  # where memory is shared, the caller's must not be written
            value = ort_value(own, self._device)
            binding.bind_ortvalue_input(name, value)
            self._fed[name] = (own, value)
            self._staging[name] = staging_for(own)
            return
        last, value = known
        if array.size != 1:
            staging = self._staging[name]
            staged = staging is not None and staging.fits(array)
            value.update_inplace(staging.filled(array) if staging and staged else array)
        elif last.item() != array.item():  # a copy costs as much as a small kernel
            value.update_inplace(array)
            last[...] = array

    def place(self, t: TensorSpec) -> Buffer | None:
        """Keep a place for every result of fixed size, so that a run can be captured."""
        sizes = _sizes(t)
        if len(sizes) != len(t.shape):
            return None
        value = ort_value(np.zeros(sizes, numpy_dtype(t.dtype)), self._device)
        return value, lambda: np.array(value.numpy())


def memory_for(device: str) -> Memory:
    """Return how to reach the memory of a device."""
    return HostMemory() if device == "cpu" else DeviceMemory(device)


def _sizes(t: TensorSpec) -> list[int]:
    return [d for d in t.shape if isinstance(d, int)]


_VERSION = 1  # of adapter and model: nobody else counts them


def write_adapter(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by the names of a model's inputs to an ``.onnx_adapter`` file.

    Raises:
        SaveError: the file system refuses.
    """
    ort = import_onnxruntime()
    target = os.path.abspath(os.fsdecode(path))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    file = ort.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    file.set_parameters({n: ort_value(a) for n, a in arrays.items()})
    part = f"{target}.part"
    try:
        file.export_adapter(part)
        os.replace(part, target)
    except (OSError, RuntimeError) as error:
        raise SaveError(f"{os.fsdecode(path)!r}: cannot be written\n  {error}") from error
