"""Memory that sessions read and write: tensors, batches, results, adapter files.

- :class:`Values` holds the tensors of a trainer in one allocation on the CPU or a device.
- :class:`HostMemory` and :class:`DeviceMemory` bring the batch to a session and read its results.
- :class:`PinnedBuffer` speeds up large batches on their way to an NVIDIA GPU.
- :func:`write_adapter` writes onnxruntime's ``.onnx_adapter`` files.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
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
from onnxtrain.runtime.devices import Device, find, import_onnxruntime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.thread_pool import available_cores

_ALIGNMENT = 64
_BFLOAT16 = 16  # TensorProto.BFLOAT16
_WORD = np.int64
_MAX_ELEMENTS = np.iinfo(np.int32).max


class Values(Mapping[str, Any]):
    """Named tensors in one allocation; ``values[name]`` is the OrtValue that sessions bind.

    Args:
        arrays: names and initial values.
        device: where the tensors live.
        on_host: whether numpy arrays share the memory, so that reading copies nothing; the choice
            of the device by default.
        release: remove each array from ``arrays`` once it is copied.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        device: str | Device,
        *,
        on_host: bool | None = None,
        release: bool = False,
    ) -> None:
        self._device = find(device)
        self.on_host = self._device.on_host if on_host is None else on_host
        """Whether numpy arrays share the memory."""
        self._arrays, self._raw = _allocate_arena(arrays, release=release)
        self.nbytes = self._raw.nbytes
        first = self._raw.ctypes.data
        self._offsets = {n: a.ctypes.data - first for n, a in self._arrays.items()}
        if self.on_host:
            self._values = {n: ort_value(a) for n, a in self._arrays.items()}
        else:
            self._memory: Any = _copy_to_device(self._raw, self._device)
            self._arrays = {n: self.like(n) for n in self._arrays}
            self._raw = np.empty(0, np.uint8)
            self._values = {n: self._window(self._offsets[n], a) for n, a in self._arrays.items()}

    def __del__(self) -> None:
        """Return the memory to the device."""
        if getattr(self, "_memory", None) is not None and not sys.is_finalizing():
            self._values, self._memory = {}, None
            _device_buffer(0, self._device)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def like(self, name: str) -> np.ndarray:
        """Return zeros of a tensor's shape and type, which take no memory of their own."""
        array = self._arrays[name]
        return np.broadcast_to(array.dtype.type(0), array.shape)

    def view(self, name: str) -> np.ndarray:
        """Return a tensor, without a copy on the host; a view changes with the next step."""
        if self.on_host:
            return self._arrays[name]
        like = self._arrays[name]
        return self._values[name].numpy().view(like.dtype).reshape(like.shape)

    def length(self, names: Sequence[str]) -> int:
        """Return the number of elements of :meth:`flat_view`."""
        start, end = self._byte_range(names)
        return (end - start) // self._arrays[names[0]].itemsize

    def flat_view(self, names: Sequence[str], start: int = 0, count: int | None = None) -> Any:
        """Return neighboring tensors of one type as one vector, alignment gaps included.

        Args:
            names: neighbors, in the order in which they were allocated.
            start: first element of the vector to return.
            count: number of elements; ``None`` for all that follow.

        Returns:
            A numpy array on the host, an OrtValue on a device; both share the memory.
        """
        dtype = self._arrays[names[0]].dtype
        count = self.length(names) - start if count is None else count
        offset = self._byte_range(names)[0] + start * dtype.itemsize
        if self.on_host:
            return self._raw[offset : offset + count * dtype.itemsize].view(dtype)
        return self._window(offset, np.broadcast_to(dtype.type(0), (count,)))

    def bytes_of(self, names: Sequence[str]) -> Any:
        """Return neighboring tensors as one vector of bytes that shares their memory."""
        start, end = self._byte_range(names)
        if self.on_host:
            return self._raw[start:end]
        return self._window(start, np.broadcast_to(np.uint8(0), (end - start,)))

    def _byte_range(self, names: Sequence[str]) -> tuple[int, int]:
        last = self._arrays[names[-1]]
        return self._offsets[names[0]], self._offsets[names[-1]] + last.size * last.itemsize

    def _window(self, offset: int, like: np.ndarray) -> Any:
        """Return an OrtValue on a part of the device memory, without memory of its own.

        onnxruntime has no constructor for that: binding the output of a session to an address
        makes such a value.
        """
        binding = _window_session().io_binding()
        dtype = _BFLOAT16 if like.dtype == ml_dtypes.bfloat16 else like.dtype.type
        address = self._memory.data_ptr() + offset
        kind, index = self._device.memory
        binding.bind_output("y", kind, index, dtype, like.shape, address)
        return binding.get_outputs()[0]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor; the caller checks shape and type."""
        if self.on_host:
            self._arrays[name][...] = array
        else:
            self._values[name].update_inplace(np.ascontiguousarray(array))

    def copies_from(self, other: Values, names: Sequence[str]) -> runtime.Copies:
        """Return the copies that set some tensors to those of another allocation.

        On a device, tensors that are neighbors in both allocations are one copy.
        """
        if self.on_host:
            return [(self.view(name), other.view(name)) for name in names]
        runs: list[list[str]] = []
        for name in sorted(names, key=self._offsets.__getitem__):
            last = runs[-1][-1] if runs else name
            distance = self._offsets[name] - self._offsets[last]
            gap = distance - self._arrays[last].nbytes
            same = distance == other._offsets[name] - other._offsets[last]
            if runs and same and gap < _ALIGNMENT:
                runs[-1].append(name)
            else:
                runs.append([name])
        copies = []
        for run in runs:
            start, end = self._byte_range(run)
            like = np.broadcast_to(np.uint8(0), (end - start,))
            copies.append((self._window(start, like), other._window(other._offsets[run[0]], like)))
        return copies


def as_ort_value(value: Any) -> Any:
    """Return an OrtValue for an array of the host; OrtValues are returned as they are."""
    return ort_value(value) if isinstance(value, np.ndarray) else value


def copy_value(target: Any, source: Any) -> None:
    """Copy an array to an array, or an OrtValue to an OrtValue."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.update_inplace(source)


def ort_value(array: np.ndarray, device: str | Device = "cpu") -> Any:
    """Return an OrtValue; on the CPU it shares the array's memory."""
    kind = import_onnxruntime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return kind.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return kind.ortvalue_from_numpy(array, *find(device).memory)


def _copy_to_device(raw: np.ndarray, device: Device) -> Any:
    """Return a copy of some bytes on a device, in a block of exactly their size.

    ``ortvalue_from_numpy`` rounds the block up to a power of two; the result of a session is not
    rounded.
    """
    words = raw.view(_WORD)
    value = _device_buffer(words.size, device)
    value.update_inplace(words)
    return value


def _device_buffer(words: int, device: Device) -> Any:
    """Return a vector of words on a device, and let the device's arena shrink to what is in use.

    Kernels index elements by 32 bits, so a session cannot compute a longer vector.
    """
    if words > _MAX_ELEMENTS:
        kind = import_onnxruntime().OrtValue
        return kind.ortvalue_from_shape_and_type([words], _WORD, *device.memory)
    session = _allocation_session(device)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.array([words], np.int64))
    binding.bind_output("y", *device.memory)
    options = None if device.on_host else runtime.shrink_arena_options(device)
    runtime.run_bound(session, binding, options)
    return binding.get_outputs()[0]


@functools.cache
def _allocation_session(device: Device) -> Any:
    """Return a session that computes a vector of zeros of a given length."""
    return _single_node_session(
        "ConstantOfShape", onnx.TensorProto.INT64, onnx.TensorProto.INT64, device
    )


@functools.cache
def _window_session() -> Any:
    """Return a session whose output :meth:`Values._window` binds to an address; it never runs."""
    return _single_node_session(
        "Identity", onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, find("cpu")
    )


def _single_node_session(op_type: str, input_type: int, output_type: int, device: Device) -> Any:
    node = onnx.NodeProto(op_type=op_type, input=["x"], output=["y"])
    if op_type == "ConstantOfShape":
        zero = onnx.TensorProto(dims=[1], data_type=output_type, raw_data=bytes(_WORD().itemsize))
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=zero)
    x, y = (onnx.ValueInfoProto(name=n) for n in "xy")
    x.type.tensor_type.elem_type, y.type.tensor_type.elem_type = input_type, output_type
    graph = onnx.GraphProto(name="memory", node=[node], input=[x], output=[y])
    opsets = [onnx.OperatorSetIdProto(version=21)]
    model = onnx.ModelProto(graph=graph, opset_import=opsets, ir_version=10)
    return runtime.create(model.SerializeToString(), device=device, threads=1)


def _allocate_arena(
    arrays: dict[str, np.ndarray], *, release: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return aligned copies of arrays, and the block of bytes that contains all of them."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    block = np.zeros(end + _ALIGNMENT, np.uint8)
    first = -block.ctypes.data % _ALIGNMENT
    raw = block[first : first + end]
    views = {}
    for name, offset in offsets.items():
        array = arrays.pop(name) if release else arrays[name]
        view = raw[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        views[name] = view
    return views, raw


_MAPS = Path("/proc/self/maps")
_PORTABLE = 1  # cudaHostAllocPortable: pinned for all devices, whichever is current
_THREADS = 4


class PinnedBuffer:
    """Pinned host memory for batches of one shape and type.

    The driver copies pageable memory through a buffer of its own, on one thread, before the GPU
    reads it. Four threads copy a large batch to pinned memory in half that time.

    Args:
        array: has the shape and type.
        address: of the pinned memory, which is freed with this object.
        library: the CUDA runtime that allocated it.
    """

    def __init__(self, array: np.ndarray, address: int, library: Any) -> None:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(address))
        self._pinned = memory.view(array.dtype).reshape(array.shape)
        weakref.finalize(self, library.cudaFreeHost, ctypes.c_void_p(address)).atexit = False

    def fits(self, array: np.ndarray) -> bool:
        """Return whether a batch has the buffer's shape and type."""
        return array.shape == self._pinned.shape and array.dtype == self._pinned.dtype

    def fill(self, array: np.ndarray) -> np.ndarray:
        """Copy a batch to pinned memory; return the copy, valid until the next one."""
        target, source = self._pinned.reshape(-1), array.reshape(-1)
        size = -(-target.size // _THREADS)
        parts = [slice(i * size, (i + 1) * size) for i in range(_THREADS)]
        list(_copy_pool().map(lambda part: np.copyto(target[part], source[part]), parts))
        return self._pinned


def pinned_buffer_for(array: np.ndarray) -> PinnedBuffer | None:
    """Return pinned memory for batches like this one, if it is available and would be faster."""
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
        library.cudaGetLastError()  # clears the error, which the next kernel would report
        return None
    return PinnedBuffer(array, address.value, library)


@functools.cache
def cuda_library() -> Any:
    """Return the CUDA runtime that onnxruntime's provider has loaded, or ``None``."""
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
def _copy_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "onnxtrain-batch")


CONTROL = ("lr", "step", "rng", "grad_scale", "reset")
"""Roles of the small inputs that a trainer sets itself."""

Buffer = tuple[Any, Callable[[], np.ndarray]]
"""An OrtValue that receives a result, and a function that reads it."""


class Memory(Protocol):
    """How the inputs and outputs of a run reach a device."""

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind what is bound once, before the first batch."""
        ...

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bind one input of a batch."""
        ...

    def result_buffer(self, t: TensorSpec) -> Buffer | None:
        """Return a fixed buffer for a result; ``None`` if every run allocates it."""
        ...


class HostMemory:
    """Memory of the CPU: a session reads the caller's arrays where they are.

    Args:
        copied: inputs that onnxruntime copies to a device when they are bound: they are bound
            again by every run.
    """

    def __init__(self, copied: frozenset[str] = frozenset()) -> None:
        self._copied = copied
        self._controls: dict[str, np.ndarray] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind learning rate, step and the like to small arrays that each run overwrites."""
        for t in (t for t in spec.inputs_of(*CONTROL) if t.name not in self._copied):
            array = np.zeros(_sizes(t), numpy_dtype(t.dtype))
            self._controls[t.name] = array
            binding.bind_ortvalue_input(t.name, ort_value(array))

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bind an array without a copy, or copy a control input."""
        if name in self._controls:
            self._controls[name][...] = array
        elif array.dtype == ml_dtypes.bfloat16:
            binding.bind_ortvalue_input(name, ort_value(array))
        else:  # a fifth of the time of an OrtValue; the binding keeps the array alive
            binding.bind_cpu_input(name, array)

    def result_buffer(self, t: TensorSpec) -> Buffer | None:
        """Return a buffer for a loss or metric; every run allocates other results."""
        if t.shape or t.role not in ("loss", "metric"):
            return None
        array = np.zeros((), numpy_dtype(t.dtype))
        return ort_value(array), lambda: np.array(array)


class DeviceMemory:
    """Memory of a device: batches are copied to fixed addresses there.

    Args:
        device: where the session runs.
    """

    def __init__(self, device: str | Device) -> None:
        self._device = find(device)
        self._fed: dict[str, tuple[np.ndarray, Any]] = {}
        self._pinned: dict[str, PinnedBuffer | None] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind nothing: the first batch allocates its inputs."""

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Copy an array to its address; a new shape gets a new address."""
        known = self._fed.get(name)
        if known is None or known[0].shape != array.shape:
            own = np.array(array)  # OrtValues of a simulated device would write the caller's array
            value = ort_value(own, self._device)
            binding.bind_ortvalue_input(name, value)
            self._fed[name] = (own, value)
            self._pinned[name] = pinned_buffer_for(own)
            return
        last, value = known
        if array.size != 1:
            pinned = self._pinned[name]
            fits = pinned is not None and pinned.fits(array)
            value.update_inplace(pinned.fill(array) if pinned and fits else array)
        elif last.item() != array.item():  # a copy costs as much as a small kernel
            value.update_inplace(array)
            last[...] = array

    def result_buffer(self, t: TensorSpec) -> Buffer | None:
        """Return a buffer for every result of fixed size, so that a run can be captured."""
        sizes = _sizes(t)
        if len(sizes) != len(t.shape):
            return None
        value = ort_value(np.zeros(sizes, numpy_dtype(t.dtype)), self._device)
        return value, lambda: np.array(value.numpy())


def memory_for(device: Device, copied: frozenset[str] = frozenset()) -> Memory:
    """Return how inputs and outputs of a run reach a device.

    Args:
        device: where the session runs.
        copied: inputs that onnxruntime copies when they are bound.
    """
    return HostMemory(copied) if device.on_host else DeviceMemory(device)


def _sizes(t: TensorSpec) -> list[int]:
    return [d for d in t.shape if isinstance(d, int)]


_VERSION = 1  # of adapter and model: the format requires both, and nothing here reads them


def write_adapter(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, named by a model's inputs, to an ``.onnx_adapter`` file.

    Raises:
        SaveError: if the file cannot be written.
    """
    ort = import_onnxruntime()
    target = os.path.abspath(os.fsdecode(path))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    file = ort.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    file.set_parameters({n: ort_value(a) for n, a in arrays.items()})
    try:
        # onnxruntime opens the file by name: in a folder of our own there are no links.
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
            part = os.path.join(folder, "adapter")
            file.export_adapter(part)
            os.replace(part, target)
    except (OSError, RuntimeError) as error:
        raise SaveError(f"{os.fsdecode(path)!r}: cannot be written\n  {error}") from error
