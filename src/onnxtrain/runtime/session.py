"""The only place that imports onnxruntime.

Denormal numbers count as zero inside a run, and as themselves everywhere else.

Vanishing gradients would run at a tenth of the speed otherwise. onnxruntime switches the mode on in
the thread that creates the first session and leaves it on; here it is switched around each run, so
that the caller's own arithmetic is not touched and a run in another thread computes the same.

The graph that a session of the CPU really runs: fused and folded.

Where onnxruntime really puts the nodes of a model.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import MissingExtraError, OnnxTrainError

_SIZE = 256  # bytes: more than a floating-point environment takes on any platform


# Not ctypes.util.find_library: it starts ldconfig or a compiler. None is the program itself, which
# has the functions where the C library does.
_NAMES = {"linux": ("libm.so.6", None), "win32": ("ucrtbase",)}


def _library() -> Any:
    for name in _NAMES.get(sys.platform, (None,)):
        try:
            library = ctypes.CDLL(name)
            for function in (library.fegetenv, library.fesetenv):
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
        except (OSError, AttributeError, TypeError):
            continue
        return library
    return None  # the mode then stays on, which is what onnxruntime does by itself


_LIBRARY = _library()
_TINY, _TWO = np.full(1, 1e-40, np.float32), np.float32(2)
_local = threading.local()


def _environment() -> ctypes.Array[ctypes.c_char] | None:
    if _LIBRARY is None:
        return None
    buffer = ctypes.create_string_buffer(_SIZE)
    return None if _LIBRARY.fegetenv(buffer) else buffer


def _known_mode() -> ctypes.Array[ctypes.c_char] | None:
    """Return the mode where its bits are known; elsewhere the first session has to show it.

    A session that the caller made before ours may have left nothing to be seen.
    """
    buffer = _environment() if sys.platform == "linux" else None
    place, bits = _BITS.get(platform.machine(), (0, 0))
    if buffer is None or not bits:
        return None
    word = int.from_bytes(buffer.raw[place : place + 4], sys.byteorder) | bits
    ctypes.memmove(ctypes.addressof(buffer) + place, word.to_bytes(4, sys.byteorder), 4)
    return buffer


# Where the control word lies in glibc's fenv_t, and its bits: FTZ and DAZ of MXCSR, FZ of FPCR.
_BITS = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}
_fast: ctypes.Array[ctypes.c_char] | None = _known_mode()


@contextmanager
def learn_denormal_mode() -> Iterator[None]:
    """Remember the mode that a session puts its thread into, then put back the caller's."""
    global _fast
    before = _environment()
    try:
        yield
    finally:
        if before is not None:
            after = _environment()
            # Only the first session of a process switches the mode on: later ones show nothing.
            # Other bits change too, as those that remember a rounding; they are no mode.
            if _fast is None and after is not None and _flushes_denormals():
                _fast = after
            _LIBRARY.fesetenv(before)


def _flushes_denormals() -> bool:
    """Return whether this thread takes denormals for zero now."""
    return not (_TINY * _TWO).any()


class FlushDenormals:
    """A context in which this thread takes denormals for zero, once a session has shown how."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = None
        if _fast is not None:
            # One buffer per thread: making one takes longer than all the rest.
            if not hasattr(_local, "before"):
                _local.before = ctypes.create_string_buffer(_SIZE)
            self._before = _local.before
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_fast)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _LIBRARY.fesetenv(self._before)


Copies = Sequence[tuple[np.ndarray, np.ndarray]]
_FOLDED_SIZE_KEY = "optimization.constant_folding_max_output_size_in_bytes"
_WEIGHTS_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
DEVICES = ("cpu", "cuda")


class ModelWithWeightsFolder(bytes):
    """A serialised model whose larger weights lie in files of a folder."""

    folder: str = ""

    @classmethod
    def of(cls, data: bytes, folder: str) -> ModelWithWeightsFolder:
        """Return the bytes with the folder."""
        made = cls(data)
        made.folder = folder
        return made


def with_weights_folder(source: bytes | str, data: bytes) -> bytes:
    """Return another model with the weights that lie beside ``source``."""
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


def check_device(device: str) -> None:
    """Refuse a device that this installation does not have."""
    if device not in DEVICES:
        raise OnnxTrainError(f"no such device: {device!r}\nhint: one of {', '.join(DEVICES)}")
    if (
        device == "cuda"
        and "CUDAExecutionProvider" not in import_onnxruntime().get_available_providers()
    ):
        raise MissingExtraError(
            "this onnxruntime has no CUDA\n"
            'hint: pip install "onnxtrain[gpu]" on a machine with a GPU'
        )


def create(
    source: bytes | str,
    *,
    device: str = "cpu",
    device_id: int = 0,
    threads: int | None = None,
    options: Any = None,
    capture: bool = False,
    rest: bool = False,
    as_shipped: bool = False,
    planned: bool = True,
) -> Any:
    """Return a session for a model, with the options that training wants.

    Args:
        source: serialised model, or a path if it has external data.
        device: ``cpu`` or ``cuda``.
        device_id: which of several.
        threads: of the session's pool; ``None`` leaves the choice to onnxruntime.
        options: the caller's own ``SessionOptions``, taken as they are.
        capture: record a run as a CUDA graph and replay it; shapes and addresses must stay.
        as_shipped: run quantised models as any user of the file would, by integer kernels.
        rest: let the pool sleep between runs, since other threads want its cores then.
        planned: whether a captured model's values get one block of memory, found in a first run.
    """
    ort = import_onnxruntime()
    if options is None:
        options = session_options(threads, as_shipped=as_shipped)
        # Sizes that never change are planned: one block of the right size.
        options.enable_mem_pattern = capture and planned
        # Memory kept for a later result of the same shape is idle until then.
        options.enable_mem_reuse = False
    if rest:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if isinstance(source, ModelWithWeightsFolder):
        options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, source.folder)
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        settings = {
            "device_id": device_id,
            "enable_cuda_graph": int(capture),
            # The other strategy rounds up to powers of two: a third more memory, no faster.
            "arena_extend_strategy": "kSameAsRequested",
        }
        providers.insert(0, ("CUDAExecutionProvider", settings))
    try:
        with learn_denormal_mode():
            return ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime refuses the model: {_first_line(error)}") from error


def session_options(threads: int | None, *, as_shipped: bool = False) -> Any:
    """Return the options that training wants; ``as_shipped`` allows fused integer kernels."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need not be printed too
    # Patterns of a dynamic batch are rarely reused and double the memory of large models.
    options.enable_mem_pattern = False
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # Zeros to scatter into are made when they are needed: kept, they take as much as a weight.
    options.add_session_config_entry(_FOLDED_SIZE_KEY, str(1 << 20))
    # Quantisers of a step stay what they are: fused to integer kernels, the forward pass would
    # round in other places than the backward pass believes, and products their inputs to 8 bits.
    options.add_session_config_entry("session.disable_quant_qdq", "0" if as_shipped else "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def shrink_arena_options(graph_id: int | None = None) -> Any:
    """Return options of a run after which a device gets back the memory that is not in use."""
    options = import_onnxruntime().RunOptions()
    if graph_id is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
    return options


def inputs_on_host(session: Any) -> frozenset[str]:
    """Return the inputs that a session reads in memory of the CPU, whatever device it is for.

    A value of a device that is bound to one of them is copied when it is bound, and not again.
    onnxruntime before 1.23 does not tell: then it is all of them.
    """
    names = [x.name for x in session.get_inputs()]
    tell = getattr(session, "get_input_memory_infos", None)
    if tell is None:
        return frozenset(names)
    return frozenset(n for n, info in zip(names, tell(), strict=True) if info.name == "Cpu")


def nodes_on_host(session: Any) -> list[str]:
    """Return the nodes that run on the CPU, of a session that records where its nodes are."""
    return [
        f"{n.op_type} {n.name!r}"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == "CPUExecutionProvider"
        for n in part.get_nodes()
    ]


def recording_options(threads: int | None) -> Any:
    """Return the options that training wants, and a record of where each node runs."""
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
    """Run a session on OrtValues; give OrtValues."""
    try:
        with FlushDenormals():
            return session.run_with_ort_values(names, feeds)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def run_bound(session: Any, binding: Any, options: Any = None) -> None:
    """Run a session on what is bound to it."""
    try:
        with FlushDenormals():
            # Without RunOptions where possible: with them a call costs ten times as much.
            session.run_with_iobinding(binding, options)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def run_each(calls: Iterable[tuple[Any, Any, Copies]]) -> None:
    """Run sessions on what is bound to them, one after the other; after each, copy arrays."""
    try:
        with FlushDenormals():  # once: for a small model it takes as long as a run
            for session, binding, copies in calls:
                session.run_with_iobinding(binding)
                for target, source in copies:
                    target[...] = source
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def executed_graph(source: bytes | str) -> onnx.ModelProto:
    """Return what onnxruntime makes of a model; nodes that it did not make keep their names.

    Its nodes are in some order that respects their inputs, not in that of a run. Weights that lie
    in other files stay there.

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
    """Nodes that leave the device with a float tensor of rank 1 or more: operator and name."""

    @property
    def clean(self) -> bool:
        """Whether no such tensor leaves the device."""
        return not self.left


def placement(source: bytes | str, *, device: str = "cuda") -> Placement:
    """Return where the nodes of a model run; shape arithmetic on the CPU is left out of ``left``.

    Args:
        source: serialised model, or a path.
        device: as in :class:`~onnxtrain.Trainer`.
    """
    check_device(device)
    old = OnnxTrainError("onnxruntime tells no placement\nhint: onnxruntime 1.24 or later")
    options = recording_options(None)
    session = create(source, device=device, options=options)
    proto = onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)
    heavy = _float_nodes(proto)
    counts: dict[str, int] = {}
    left: list[str] = []
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise old
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(nodes)
        if device == "cpu" or part.ep_name != "CPUExecutionProvider":
            continue
        # A node that onnxruntime made itself has no known tensors: it counts.
        left += [f"{n.op_type} {n.name!r}" for n in nodes if heavy.get(n.name, True)]
    if not counts:
        raise old
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
