"""The only module that imports onnxruntime: sessions, their options, and their runs.

It also holds what belongs to every run: denormal numbers count as zero inside a run and keep their
value outside of it. Vanishing gradients would run at a tenth of the speed otherwise. onnxruntime
turns that mode on in the thread that creates the first session, and leaves it on. Here it is turned
on around each run instead, so that the caller's own arithmetic does not change and a run in another
thread computes the same.

The end of the file answers what a session really runs: :func:`executed_graph` returns the graph
after onnxruntime's optimizations, :func:`placement` the execution provider of each node.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.graph.io import save

_FENV_BYTES = 256  # more than a floating-point environment (fenv_t) takes on any platform

# Not ctypes.util.find_library, which starts ldconfig or a compiler. None is the program itself,
# which exports the functions where the C library does.
_LIBRARY_NAMES = {"linux": ("libm.so.6", None), "win32": ("ucrtbase",)}


def _load_math_library() -> Any:
    for name in _LIBRARY_NAMES.get(sys.platform, (None,)):
        try:
            library = ctypes.CDLL(name)
            for function in (library.fegetenv, library.fesetenv):
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
        except (OSError, AttributeError, TypeError):
            continue
        return library
    return None  # the mode then stays on, as onnxruntime leaves it


_LIBRARY = _load_math_library()
_TINY, _TWO = np.full(1, 1e-40, np.float32), np.float32(2)
_local = threading.local()


def _environment() -> ctypes.Array[ctypes.c_char] | None:
    if _LIBRARY is None:
        return None
    buffer = ctypes.create_string_buffer(_FENV_BYTES)
    return None if _LIBRARY.fegetenv(buffer) else buffer


def _known_mode() -> ctypes.Array[ctypes.c_char] | None:
    """Return the mode if its bits are known; elsewhere the first session reveals it.

    A session that the caller created before ours may have turned the mode on already, and ours
    would then reveal nothing.
    """
    buffer = _environment() if sys.platform == "linux" else None
    offset, bits = _FLUSH_BITS.get(platform.machine(), (0, 0))
    if buffer is None or not bits:
        return None
    word = int.from_bytes(buffer.raw[offset : offset + 4], sys.byteorder) | bits
    ctypes.memmove(ctypes.addressof(buffer) + offset, word.to_bytes(4, sys.byteorder), 4)
    return buffer


# Offset of the control word in glibc's fenv_t, and its bits: FTZ and DAZ of MXCSR, FZ of FPCR.
_FLUSH_BITS = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}
_flush_mode: ctypes.Array[ctypes.c_char] | None = _known_mode()


@contextmanager
def learn_denormal_mode() -> Iterator[None]:
    """Remember the mode into which a session puts its thread, then restore the caller's."""
    global _flush_mode
    before = _environment()
    try:
        yield
    finally:
        if before is not None:
            after = _environment()
            # Only the first session of a process turns the mode on. Other bits change as well,
            # such as the sticky flags of rounding, so the effect itself is tested.
            if _flush_mode is None and after is not None and _flushes_denormals():
                _flush_mode = after
            _LIBRARY.fesetenv(before)


def _flushes_denormals() -> bool:
    """Return whether denormal numbers count as zero in this thread now."""
    return not (_TINY * _TWO).any()


class FlushDenormals:
    """A context in which denormal numbers count as zero in this thread."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = None
        if _flush_mode is not None:
            # One buffer per thread: allocating it takes longer than switching the mode.
            if not hasattr(_local, "before"):
                _local.before = ctypes.create_string_buffer(_FENV_BYTES)
            self._before = _local.before
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_flush_mode)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _LIBRARY.fesetenv(self._before)


Copies = Sequence[tuple[Any, Any]]
"""Pairs (target, source): numpy arrays of the host, or OrtValues of a device."""

_FOLDED_SIZE_KEY = "optimization.constant_folding_max_output_size_in_bytes"
_WEIGHTS_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
DEVICES = ("cpu", "cuda")
"""Kinds of devices; ``cuda:1`` is the second one of a kind."""


class ModelWithWeightsFolder(bytes):
    """A serialized model whose large weights are in files of a folder."""

    folder: str = ""

    @classmethod
    def of(cls, data: bytes, folder: str) -> ModelWithWeightsFolder:
        """Return the bytes with the folder."""
        model = cls(data)
        model.folder = folder
        return model


def with_weights_folder(source: bytes | str, data: bytes) -> bytes:
    """Return a serialized model that reads its external weights from the folder of ``source``."""
    if isinstance(source, str):
        return ModelWithWeightsFolder.of(data, os.path.dirname(os.path.abspath(source)))
    return (
        ModelWithWeightsFolder.of(data, source.folder)
        if isinstance(source, ModelWithWeightsFolder)
        else data
    )


def import_onnxruntime() -> ModuleType:
    """Return the onnxruntime module.

    Raises:
        MissingExtraError: with the command that installs it.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            'onnxruntime is not installed\nhint: pip install "onnxtrain[cpu]" (or [gpu])'
        ) from error
    return onnxruntime


def split_device(device: str) -> tuple[str, int]:
    """Return the kind and the index of a device.

    >>> split_device("cuda:1"), split_device("cpu")
    (('cuda', 1), ('cpu', 0))
    """
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


def check_device(device: str) -> None:
    """Raise an error if the device is unknown, or this installation does not support it."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        expected = ", ".join(map(repr, (*DEVICES, "cuda:1")))
        raise OnnxTrainError(f"unknown device: {device!r} (expected one of {expected})")
    if (
        device != "cpu"
        and "CUDAExecutionProvider" not in import_onnxruntime().get_available_providers()
    ):
        raise MissingExtraError(
            "this onnxruntime has no CUDA support\n"
            'hint: pip install "onnxtrain[gpu]" on a machine with a GPU'
        )


def create(
    source: bytes | str,
    *,
    device: str = "cpu",
    threads: int | None = None,
    options: Any = None,
    capture: bool = False,
    rest: bool = False,
    as_shipped: bool = False,
    planned: bool = True,
    profile: str | None = None,
) -> Any:
    """Return a session for a model, with the options of training.

    Args:
        source: serialized model, or a path if it has external data.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: size of the session's thread pool; ``None`` leaves the choice to onnxruntime.
        options: ``SessionOptions`` to use in place of those of training.
        capture: capture a run as a CUDA graph and replay it; shapes and addresses must not change.
        as_shipped: run quantized models by integer kernels, as any user of the file would.
        rest: let the thread pool sleep between runs, because other threads need its cores then.
        planned: allocate the values of a captured model in one block, sized by a first run.
        profile: file prefix for onnxruntime's profiler; ``end_profiling`` returns the file.
    """
    ort = import_onnxruntime()
    if options is None:
        options = session_options(threads, as_shipped=as_shipped)
        # All sizes are fixed if runs are captured: one block of the right size serves them.
        options.enable_mem_pattern = capture and planned
        # Reuse by shape keeps memory idle until the next value of the same shape.
        options.enable_mem_reuse = False
    if rest:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    if isinstance(source, ModelWithWeightsFolder):
        options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, source.folder)
    providers: list[Any] = ["CPUExecutionProvider"]
    kind, index = split_device(device)
    if kind == "cuda":
        settings = {
            "device_id": index,
            "enable_cuda_graph": int(capture),
            # The default strategy rounds up to powers of two: a third more memory, not faster.
            "arena_extend_strategy": "kSameAsRequested",
        }
        providers.insert(0, ("CUDAExecutionProvider", settings))
    quiet = _without_default_warnings(ort) if device == "cuda" else nullcontext()
    try:
        with quiet, learn_denormal_mode():
            return ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime cannot load the model: {_first_line(error)}") from error


_WARNING, _ERROR = 2, 3  # severities of onnxruntime's loggers; warnings are its default


@contextmanager
def _without_default_warnings(ort: ModuleType) -> Generator[None]:
    """Silence the default logger while a session is created.

    Since 1.30 each session on a GPU warns there that it found no plugin for the built-in provider,
    whatever the severity of its own logger.
    """
    ort.set_default_logger_severity(_ERROR)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNING)


def create_for(model: ir.Model, *, threads: int | None = None) -> Any:
    """Return a session for a model in memory, run as any user of the file would run it.

    Written to a file first: onnxruntime cannot read a protobuf of over 2 GiB from memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.onnx")
        save(model, file)
        return create(file, threads=threads, as_shipped=True)


def session_options(threads: int | None, *, as_shipped: bool = False) -> Any:
    """Return the session options of training; ``as_shipped`` allows fused integer kernels."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised; printing them, too, would repeat them
    # Memory patterns of a dynamic batch are rarely reused, and double the memory of large models.
    options.enable_mem_pattern = False
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # Zeros that a gradient is scattered into would be folded to a constant as large as a weight.
    options.add_session_config_entry(_FOLDED_SIZE_KEY, str(1 << 20))
    # Keep QuantizeLinear/DequantizeLinear pairs: fused to integer kernels, the forward pass would
    # round at other places than the backward pass assumes, and quantize the inputs of matmuls.
    options.add_session_config_entry("session.disable_quant_qdq", "0" if as_shipped else "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def shrink_arena_options(device: str, graph_id: int | None = None) -> Any:
    """Return options of a run after which the arena returns unused memory to the device."""
    options = import_onnxruntime().RunOptions()
    if graph_id is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry(
        "memory.enable_memory_arena_shrinkage", f"gpu:{split_device(device)[1]}"
    )
    return options


def inputs_on_host(session: Any) -> frozenset[str]:
    """Return the inputs that a session reads in CPU memory, whatever its device.

    onnxruntime copies a device value that is bound to such an input once, at bind time. Before
    onnxruntime 1.23 there is no way to find out, so all inputs are returned.
    """
    names = [x.name for x in session.get_inputs()]
    memory_infos = getattr(session, "get_input_memory_infos", None)
    if memory_infos is None:
        return frozenset(names)
    return frozenset(n for n, info in zip(names, memory_infos(), strict=True) if info.name == "Cpu")


def nodes_on_host(session: Any) -> list[str]:
    """Return the nodes that run on the CPU; the session needs :func:`recording_options`."""
    return [
        f"{n.op_type} {n.name!r}"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == "CPUExecutionProvider"
        for n in part.get_nodes()
    ]


def recording_options(threads: int | None) -> Any:
    """Return the session options of training, with a record of each node's provider."""
    options = session_options(threads)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


def run(session: Any, names: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session on arrays."""
    try:
        with FlushDenormals():
            return session.run(names, feeds)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def run_values(session: Any, names: list[str], feeds: dict[str, Any]) -> list[Any]:
    """Run a session on OrtValues; return OrtValues."""
    try:
        with FlushDenormals():
            return session.run_with_ort_values(names, feeds)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def run_bound(session: Any, binding: Any, options: Any = None) -> None:
    """Run a session on its bindings."""
    try:
        with FlushDenormals():
            # Without RunOptions where possible: with them a call costs ten times as much.
            session.run_with_iobinding(binding, options)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def run_each(calls: Iterable[tuple[Any, Any, Copies]]) -> None:
    """Run sessions on their bindings in sequence, with copies after each."""
    try:
        with FlushDenormals():  # once for all: it takes as long as the run of a small model
            for session, binding, copies in calls:
                session.run_with_iobinding(binding)
                for target, source in copies:
                    target[...] = source
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def load_graph(source: bytes | str) -> onnx.ModelProto:
    """Return a model without its external weights."""
    if isinstance(source, str):
        return onnx.load(source, load_external_data=False)
    return onnx.load_from_string(source)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def executed_graph(source: bytes | str) -> onnx.ModelProto:
    """Return a model after onnxruntime's optimizations; nodes it does not touch keep their names.

    The nodes are in a topological order, which is not the order of execution. External weights are
    not loaded.

    Args:
        source: as for :func:`onnxtrain.runtime.session.create`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed.onnx"
        options = session_options(1)
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.disable_prepacking", "1")
        create(source, threads=1, options=options)
        return onnx.load(path, load_external_data=False)


_FLOATS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The nodes of a model by execution provider."""

    counts: dict[str, int]
    """Number of nodes of each provider, after onnxruntime's own simplifications."""
    left: tuple[str, ...]
    """Nodes that fall back to the CPU with a float tensor of rank 1 or more: operator and name."""

    @property
    def clean(self) -> bool:
        """Whether no such node falls back to the CPU."""
        return not self.left


def placement(source: bytes | str, *, device: str = "cuda") -> Placement:
    """Return where the nodes of a model run; ``left`` does not list shape arithmetic on the CPU.

    Args:
        source: serialized model, or a path.
        device: as in :class:`~onnxtrain.Trainer`.
    """
    check_device(device)
    unsupported = OnnxTrainError(
        "this onnxruntime version does not report node placement\n"
        "hint: pip install 'onnxruntime>=1.24'"
    )
    session = create(source, device=device, options=recording_options(None))
    proto = onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)
    float_nodes = _float_nodes(proto)
    counts: dict[str, int] = {}
    left: list[str] = []
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise unsupported
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(nodes)
        if device == "cpu" or part.ep_name != "CPUExecutionProvider":
            continue
        # The tensors of a node that onnxruntime inserted are unknown: it counts.
        left += [f"{n.op_type} {n.name!r}" for n in nodes if float_nodes.get(n.name, True)]
    if not counts:
        raise unsupported
    return Placement(counts, tuple(left))


def _float_nodes(model: onnx.ModelProto) -> dict[str, bool]:
    """Return for each node whether it reads or writes a float tensor of rank 1 or more."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = ir.from_proto(inferred).graph
    return {
        node.name or "": any(_is_float_tensor(x) for x in (*node.inputs, *node.outputs))
        for node in graph
    }


def _is_float_tensor(x: ir.Value | None) -> bool:
    if x is None or x.dtype is None:
        return False
    return x.dtype.name in _FLOATS and (x.shape is None or len(x.shape) > 0)
