"""Sessions of onnxruntime, their options, and their runs.

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
import math
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, by_caller
from onnxtrain.graph.io import save
from onnxtrain.graph.nodes import captured
from onnxtrain.runtime import devices
from onnxtrain.runtime.devices import CPU, Device, first_line, import_onnxruntime, last_lines

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
_RECORD_KEY = "session.record_ep_graph_assignment_info"


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


def create(
    source: bytes | str,
    *,
    device: str | Device = "cpu",
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
        device: a name, or an entry of :mod:`onnxtrain.runtime.devices`.
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
    device = devices.find(device)
    if not device.is_cpu and not capture:  # a captured run has no nodes on the CPU
        _record_placement(options)
    quiet = _without_default_warnings(ort) if device.name == "cuda" else nullcontext()
    try:
        with quiet, learn_denormal_mode():
            session = devices.open_session(
                source, options, device, capture=capture, threads=threads
            )
    except OnnxTrainError:
        raise
    except Exception as error:  # onnxruntime's errors share no base class
        if not device.is_cpu:
            _check_start(device)
        where, why = (
            ("", first_line(error)) if device.is_cpu else (f" on {device}", last_lines(error))
        )
        raise OnnxTrainError(f"onnxruntime cannot load the model{where}: {why}") from error
    if not device.is_cpu:
        _check_providers(session, device)
        if not capture:
            _check_share(session, device, source)
    return session


def _check_start(device: Device) -> None:
    """Raise an error if a device cannot run one addition, so that the model is not to blame."""
    x, y = (onnx.ValueInfoProto(name=n) for n in "xy")
    for value in (x, y):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        value.type.tensor_type.shape.dim.add(dim_value=2)
    node = onnx.NodeProto(op_type="Add", input=["x", "x"], output=["y"])
    graph = onnx.GraphProto(name="start", node=[node], input=[x], output=[y])
    opsets = [onnx.OperatorSetIdProto(version=17)]
    model = onnx.ModelProto(graph=graph, opset_import=opsets, ir_version=8)
    try:
        with learn_denormal_mode():
            session = devices.open_session(model.SerializeToString(), session_options(1), device)
    except OnnxTrainError:
        raise
    except Exception as error:  # onnxruntime's errors share no base class
        raise _not_started(device, last_lines(error)) from error
    _check_providers(session, device)


def _check_providers(session: Any, device: Device) -> None:
    """Raise an error if onnxruntime left out the provider of a device."""
    if device.provider not in session.get_providers():
        raise _not_started(device, "onnxruntime fell back to the CPU without an error")


def _not_started(device: Device, why: str) -> OnnxTrainError:
    return OnnxTrainError(
        f"{device}: {device.provider} does not start: {why}\n"
        "hint: `onnxtrain devices` lists the devices of this machine; "
        + by_caller('device="cpu" trains on the CPU', "--device cpu trains on the CPU")
    )


_MAX_LISTED = 5
_CPU_SHARE = 0.25
"""Share of the nodes with float tensors that may run on the CPU beside a device."""


def _check_share(session: Any, device: Device, source: bytes | str) -> None:
    """Raise an error if most of a model runs on the CPU; shape arithmetic belongs there.

    A provider that lacks kernels is not an error of onnxruntime: it runs these nodes on the CPU,
    and copies what they read and write.
    """
    if device.allow_cpu_fallback:
        return
    placed = _placed_nodes(session)
    counts = {provider: len(nodes) for provider, nodes in placed.items()}
    if not counts.get(CPU) or counts[CPU] <= _CPU_SHARE * sum(counts.values()):
        return
    float_nodes = {node.name: _has_float_tensor(node) for node in _inferred(load_graph(source))}
    left = [f"{op} {name!r}" for op, name in placed[CPU] if float_nodes.get(name, True)]
    total = len(left) + sum(n for provider, n in counts.items() if provider != CPU)
    if len(left) <= _CPU_SHARE * total:
        return
    more = ", ..." if len(left) > _MAX_LISTED else ""
    raise OnnxTrainError(
        f"{device}: {len(left)} of {total} nodes would run on the CPU: "
        f"{', '.join(left[:_MAX_LISTED])}{more}\nhint: "
        + by_caller(
            f'build(..., target="{device.target}") generates operators for this device; '
            "Trainer(..., allow_cpu_fallback=True) accepts the CPU",
            f"onnxtrain build ... --target {device.target} generates operators for this device; "
            "--device cpu trains on the CPU",
        )
    )


def _placed_nodes(session: Any) -> dict[str, list[tuple[str, str]]]:
    """Return operator and name of the nodes by provider; empty before onnxruntime 1.24.

    The session must have been created with a record of them.
    """
    placed: dict[str, list[tuple[str, str]]] = {}
    if hasattr(session, "get_provider_graph_assignment_info"):
        for part in session.get_provider_graph_assignment_info():
            nodes = [(n.op_type, n.name) for n in part.get_nodes()]
            placed.setdefault(part.ep_name, []).extend(nodes)
    return placed


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


def shrink_arena_options(device: str | Device, graph_id: int | None = None) -> Any:
    """Return options of a run after which the arena returns unused memory to the device."""
    options = import_onnxruntime().RunOptions()
    if graph_id is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry(
        "memory.enable_memory_arena_shrinkage", f"gpu:{devices.find(device).memory[1]}"
    )
    return options


def inputs_copied_when_bound(session: Any, device: Device) -> frozenset[str]:
    """Return the inputs that a session reads in other memory than that of the device.

    onnxruntime copies a value that is bound to such an input once, at bind time. Before onnxruntime
    1.23 there is no way to find out, so all inputs are returned.
    """
    names = [x.name for x in session.get_inputs()]
    memory_infos = getattr(session, "get_input_memory_infos", None)
    if memory_infos is None:
        return frozenset(names)
    infos = zip(names, memory_infos(), strict=True)
    return frozenset(n for n, info in infos if (info.name == "Cpu") != device.on_host)


def nodes_on_host(session: Any) -> list[str]:
    """Return the nodes that run on the CPU; the session needs :func:`recording_options`."""
    return [f"{op} {name!r}" for op, name in _placed_nodes(session).get(CPU, ())]


def recording_options(threads: int | None) -> Any:
    """Return the session options of training, with a record of each node's provider."""
    options = session_options(threads)
    _record_placement(options)
    return options


def _record_placement(options: Any) -> None:
    try:
        options.get_session_config_entry(_RECORD_KEY)  # onnxruntime warns of a second entry
    except RuntimeError:
        options.add_session_config_entry(_RECORD_KEY, "1")


def run(session: Any, names: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session on arrays."""
    try:
        with FlushDenormals():
            return session.run(names, feeds)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {first_line(error)}") from error


def run_values(session: Any, names: list[str], feeds: dict[str, Any]) -> list[Any]:
    """Run a session on OrtValues; return OrtValues."""
    try:
        with FlushDenormals():
            return session.run_with_ort_values(names, feeds)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {first_line(error)}") from error


def run_bound(session: Any, binding: Any, options: Any = None) -> None:
    """Run a session on its bindings."""
    try:
        with FlushDenormals():
            # Without RunOptions where possible: with them a call costs ten times as much.
            session.run_with_iobinding(binding, options)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {first_line(error)}") from error


def run_each(calls: Iterable[tuple[Any, Any, Copies]]) -> None:
    """Run sessions on their bindings in sequence, with copies after each."""
    try:
        with FlushDenormals():  # once for all: it takes as long as the run of a small model
            for session, binding, copies in calls:
                session.run_with_iobinding(binding)
                for target, source in copies:
                    target[...] = source
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {first_line(error)}") from error


def load_graph(source: bytes | str) -> onnx.ModelProto:
    """Return a model without its external weights."""
    if isinstance(source, str):
        return onnx.load(source, load_external_data=False)
    return onnx.load_from_string(source)


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
    copies: tuple[str, ...] = ()
    """Tensors that one provider computes and another one reads."""
    copied_bytes: int = 0
    """Bytes of these tensors in one run; those of unknown size are not counted."""

    @property
    def clean(self) -> bool:
        """Whether no such node falls back to the CPU."""
        return not self.left


def placement(
    source: bytes | str, *, device: str | Device = "cuda", sizes: Mapping[str, int] | None = None
) -> Placement:
    """Return where the nodes of a model run; ``left`` does not list shape arithmetic on the CPU.

    Args:
        source: serialized model, or a path.
        device: as in :class:`~onnxtrain.Trainer`.
        sizes: values of symbolic sizes, to count the bytes of copies.
    """
    device = devices.find(devices.check(device), allow_cpu_fallback=True)
    session = create(source, device=device, options=recording_options(None))
    placed = _placed_nodes(session)
    if not placed:
        raise OnnxTrainError(
            "this onnxruntime version does not report node placement\n"
            "hint: pip install 'onnxruntime>=1.24'"
        )
    graph = _inferred(load_graph(source))
    # The tensors of a node that onnxruntime inserted are unknown: it counts.
    float_nodes = {node.name: _has_float_tensor(node) for node in graph}
    left = [] if device.is_cpu else placed.get(CPU, [])
    where = {name: provider for provider, nodes in placed.items() for _, name in nodes if name}
    copied: dict[str, int] = {}
    for node in graph:
        for x in (*node.inputs, *captured(node)):
            maker = x.producer() if x is not None else None
            ends = [where.get(n.name or "") for n in (node, maker) if n is not None]
            if x is not None and maker is not None and None not in ends and len({*ends}) > 1:
                copied[x.name or ""] = _nbytes(x, sizes or {})
    return Placement(
        {provider: len(nodes) for provider, nodes in placed.items()},
        tuple(f"{op} {name!r}" for op, name in left if float_nodes.get(name, True)),
        tuple(copied),
        sum(copied.values()),
    )


def _inferred(model: onnx.ModelProto) -> ir.Graph:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return ir.from_proto(inferred).graph


def _has_float_tensor(node: ir.Node) -> bool:
    """Return whether a node reads or writes a float tensor of rank 1 or more."""
    return any(_is_float_tensor(x) for x in (*node.inputs, *node.outputs))


def _nbytes(x: ir.Value, sizes: Mapping[str, int]) -> int:
    if x.shape is None or x.dtype is None:
        return 0
    dims = [d if isinstance(d, int) else sizes.get(str(d), 0) for d in x.shape]
    return math.prod(dims) * x.dtype.bitwidth // 8


def _is_float_tensor(x: ir.Value | None) -> bool:
    if x is None or x.dtype is None:
        return False
    return x.dtype.name in _FLOATS and (x.shape is None or len(x.shape) > 0)
