"""The only place that imports onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.runtime.denormals import FlushDenormals, learning_mode

Copies = Sequence[tuple[np.ndarray, np.ndarray]]
_FOLDED = "optimization.constant_folding_max_output_size_in_bytes"
_FOLDER = "session.model_external_initializers_file_folder_path"
DEVICES = ("cpu", "cuda")


class BesideWeights(bytes):
    """A serialised model whose larger weights lie in files of a folder."""

    folder: str = ""

    @classmethod
    def of(cls, data: bytes, folder: str) -> BesideWeights:
        """Return the bytes with the folder."""
        made = cls(data)
        made.folder = folder
        return made


def in_place_of(source: bytes | str, data: bytes) -> bytes:
    """Return another model with the weights that lie beside ``source``."""
    if isinstance(source, str):
        return BesideWeights.of(data, os.path.dirname(os.path.abspath(source)))
    return BesideWeights.of(data, source.folder) if isinstance(source, BesideWeights) else data


def runtime() -> ModuleType:
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
    if device == "cuda" and "CUDAExecutionProvider" not in runtime().get_available_providers():
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
    ort = runtime()
    if options is None:
        options = session_options(threads, as_shipped=as_shipped)
        # Sizes that never change are planned: one block of the right size.
        options.enable_mem_pattern = capture and planned
        # Memory kept for a later result of the same shape is idle until then.
        options.enable_mem_reuse = False
    if rest:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if isinstance(source, BesideWeights):
        options.add_session_config_entry(_FOLDER, source.folder)
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
        with learning_mode():
            return ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(f"onnxruntime refuses the model: {_first_line(error)}") from error


def session_options(threads: int | None, *, as_shipped: bool = False) -> Any:
    """Return the options that training wants; ``as_shipped`` allows fused integer kernels."""
    ort = runtime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need not be printed too
    # Patterns of a dynamic batch are rarely reused and double the memory of large models.
    options.enable_mem_pattern = False
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # Zeros to scatter into are made when they are needed: kept, they take as much as a weight.
    options.add_session_config_entry(_FOLDED, str(1 << 20))
    # Quantisers of a step stay what they are: fused to integer kernels, the forward pass would
    # round in other places than the backward pass believes, and products their inputs to 8 bits.
    options.add_session_config_entry("session.disable_quant_qdq", "0" if as_shipped else "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def giving_memory_back(graph_id: int | None = None) -> Any:
    """Return options of a run after which a device gets back the memory that is not in use."""
    options = runtime().RunOptions()
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
