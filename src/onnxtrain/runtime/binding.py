"""A model bound to the memory it reads and writes, and CUDA graph capture of its runs.

:class:`BoundSession` runs a model step after step. :func:`open_session` opens the session of a
step, with CUDA graph capture if the model allows it; :func:`capture_obstacle` says what does not.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from onnxtrain import thresholds as T
from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import Device, find, import_onnxruntime
from onnxtrain.runtime.ort_values import memory_for, ort_value

logger = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]
_CHECKED_RUN = 2  # the first run that could read stale values
_NOT_CAPTURED = -1  # the graph id of a run that is neither captured nor replayed
_WARMED_UP: weakref.WeakSet[Any] = weakref.WeakSet()  # sessions that have run once


class BoundSession:
    """A session whose inputs and outputs are bound once; each run brings only the batch.

    The life of a step on CUDA, if its runs are captured as a CUDA graph:

    1. The first run of a session settles: it runs without capture (graph id -1). onnxruntime
       learns the total size of all activations and shrinks the arena afterwards, so that the next
       run allocates one block of the right size.
    2. The second run is captured: the kernels run, and CUDA records them with their addresses. It
       is also checked: a third run with fresh bindings and without capture must give the same
       loss. A kernel may refuse capture only here; then ``reopen`` gives a session without.
    3. Every later run copies the batch to the same addresses (through pinned memory if the batch is
       large) and replays the graph with one launch.

    Without capture all runs are alike, and the second one is checked in the same way. A model that
    writes over its inputs is neither settled nor checked, since it cannot run twice.

    Args:
        session: runs the model.
        spec: describes the model.
        inputs: OrtValues that every run reads, by input name.
        outputs: OrtValues that receive results, by output name; all others are returned as arrays.
        device: where the session runs.
        graph_id: id of the captured run if the session captures; each binding has its own.
        reopen: returns a session for the same model that does not capture, for the case that the
            first captured run fails; without it, that is an error.
    """

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: str | Device = "cpu",
        graph_id: int | None = None,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        device = find(device)
        self._arguments = (spec, dict(inputs), dict(outputs), device)
        self._reopen = reopen if graph_id is not None else None
        self._in_place = any(y is x for y in outputs.values() for x in inputs.values())
        self._runs_to_check = 0 if device.is_cpu or self._in_place else _CHECKED_RUN
        self.capture_error: str | None = None
        """Why the first captured run failed, if it did."""
        self._bind(session, graph_id)

    @property
    def captured(self) -> bool:
        """Whether runs are captured and replayed."""
        return self._options is not None

    def _bind(self, session: Any, graph_id: int | None) -> None:
        spec, inputs, outputs, device = self._arguments
        self.session, self.binding = session, session.io_binding()
        # onnxruntime copies an input that the session reads in other memory once, at bind time: it
        # must be bound every run.
        self._copied = frozenset[str]()
        if not device.is_cpu:
            self._copied = runtime.inputs_copied_when_bound(session, device)
        self._rebound = {n: v for n, v in inputs.items() if n in self._copied}
        self._memory = memory_for(device, self._copied)
        for name, value in inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        self._memory.prepare(self.binding, spec)
        self._readers: dict[str, Callable[[], np.ndarray]] = {}
        self._allocated: list[str] = []
        for t in spec.outputs:
            if t.name in outputs:
                self.binding.bind_ortvalue_output(t.name, outputs[t.name])
            elif (buffer := self._memory.result_buffer(t)) is not None:
                value, self._readers[t.name] = buffer
                self.binding.bind_ortvalue_output(t.name, value)
            else:
                self._allocated.append(t.name)
        # get_outputs lists results in the order in which outputs were bound first.
        self._fixed_outputs = len(spec.outputs) - len(self._allocated)
        # Never RunOptions on the CPU: with them a call costs ten times as much.
        self._options = None if graph_id is None else _capture_options(graph_id)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run on a batch; return the outputs that were not bound."""
        for name, array in feeds.items():
            if name in self._copied:
                self.binding.bind_ortvalue_input(name, ort_value(np.ascontiguousarray(array)))
            else:
                self._memory.feed(self.binding, name, array)
        for name, value in self._rebound.items():
            self.binding.bind_ortvalue_input(name, value)
        settling = self._is_settling_run()
        try:
            outputs = self._run(settling=settling)
        except OnnxTrainError as error:
            if self._reopen is None:
                raise
            self.capture_error = str(error)
            warnings.warn(
                f"a step could not be captured as a CUDA graph and runs without: {error}",
                stacklevel=2,
            )
            session, self._reopen = self._reopen(), None
            self._bind(session, None)
            return self.run(feeds)
        if settling:
            _WARMED_UP.add(self.session)
        else:
            self._reopen = None
        if self._runs_to_check:
            self._runs_to_check -= 1
            if not self._runs_to_check:
                self._check(feeds, outputs)
        return outputs

    def _is_settling_run(self) -> bool:
        """Return whether the next run is the session's first and must not be captured.

        Only the session's first run settles, not the first of each binding: shrinking the arena
        later could free memory that the other binding's graph has recorded. A model that writes
        over its inputs has no activations of its own to settle.
        """
        captures = self._options is not None and not self._in_place
        return captures and self.session not in _WARMED_UP

    def _run(self, *, settling: bool) -> dict[str, np.ndarray]:
        for name in self._allocated:
            # Bound again every run: onnxruntime would write over the last result otherwise.
            self.binding.bind_output(name, "cpu")
        device = self._arguments[3]
        options = runtime.shrink_arena_options(device, _NOT_CAPTURED) if settling else self._options
        runtime.run_bound(self.session, self.binding, options)
        outputs = {name: read() for name, read in self._readers.items()}
        if self._allocated:
            results = self.binding.get_outputs()[self._fixed_outputs :]
            outputs.update({n: r.numpy() for n, r in zip(self._allocated, results, strict=True)})
        return outputs

    def _check(self, feeds: Arrays, outputs: dict[str, np.ndarray]) -> None:
        """Compare the loss of a run with that of fresh bindings.

        A device that reads values as they were at bind time is right in its first step only. The
        check costs one step, once.

        Raises:
            OnnxTrainError: if the losses differ and the model draws no random numbers.
        """
        spec, inputs, targets, device = self._arguments
        again = BoundSession(self.session, spec, inputs, targets, device)
        again._options = None if self._options is None else _capture_options(_NOT_CAPTURED)
        again._runs_to_check = 0
        self._arguments = (spec, {}, {}, device)
        expected = again.run(feeds)
        names = [t.name for t in spec.outputs_of("loss")]
        if _all_close(outputs, expected, names):
            return
        if not _all_close(again.run(feeds), expected, names):
            return  # two runs of the same bindings differ as well: the model is random
        raise OnnxTrainError(
            f"{device} computes with old values: in run {_CHECKED_RUN} the loss is "
            f"{[outputs[n].item() for n in names]}, with fresh bindings it is "
            f"{[expected[n].item() for n in names]}\n"
            "hint: this is a bug in the bindings; please report it, and train on the CPU"
        )


def _all_close(a: Arrays, b: Arrays, names: list[str]) -> bool:
    return all(np.allclose(a[n], b[n], 1e-2, 1e-3, equal_nan=True) for n in names)


def _capture_options(graph_id: int) -> Any:
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


_CAPTURE_ERROR = "graph capture feature"  # in onnxruntime's message when a node is on the CPU
_MAX_LISTED_NODES = 5
_SIZE_OPERATORS = ("Shape", "Size")  # shape inference folds them if all sizes are fixed
_GRAPH_ATTRIBUTES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def capture_obstacle(model: onnx.ModelProto, spec: ModelSpec) -> str | None:
    """Return why the runs of a model cannot be captured, or ``None`` if they can.

    A replay repeats kernels and addresses: all sizes must be fixed, and no node may branch.
    """
    for t in (*spec.inputs, *spec.outputs):
        free = [d for d in t.shape if not isinstance(d, int)]
        if free:
            return f"{t.name!r} has symbolic sizes: {', '.join(map(str, free))}"
    for node in model.graph.node:
        if any(a.type in _GRAPH_ATTRIBUTES for a in node.attribute):
            return f"{node.op_type} {node.name!r} has a subgraph"
        if node.op_type in _SIZE_OPERATORS:
            return f"{node.op_type} {node.name!r} computes a size at run time"
        if node.op_type == "Concat" and len(node.input) > T.CUDA_GRAPH_CONCAT_INPUTS:
            return f"Concat {node.name!r} joins more than {T.CUDA_GRAPH_CONCAT_INPUTS} tensors"
    return None


def capture_fix(model: onnx.ModelProto, spec: ModelSpec) -> str:
    """Return what makes a step capturable, or that nothing does."""
    sizes = [d for t in (*spec.inputs, *spec.outputs) for d in t.shape if not isinstance(d, int)]
    if sizes:
        names = ", ".join(f"{d!r}: 32" for d in dict.fromkeys(sizes) if d.isidentifier())
        return f"build(..., dims={{{names}}}) fixes them; every batch has these sizes then"
    bodies = [n for n in model.graph.node if any(a.type in _GRAPH_ATTRIBUTES for a in n.attribute)]
    if bodies:
        recurrent = ", which recurrent layers become," if bodies[0].op_type == "Scan" else ""
        return (
            f"{bodies[0].op_type}{recurrent} is not captured by onnxruntime: the step runs node by "
            "node; capture=False accepts that"
        )
    if any(n.op_type in _SIZE_OPERATORS for n in model.graph.node):
        return "build(..., dims={...}) with all sizes fixed"
    return "capture=False accepts that"


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    """Warn of something once per process: trainers are created many times in a notebook."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def check_capture(
    source: bytes | str,
    spec: ModelSpec,
    capture: bool | None,
    *,
    device: str | Device,
    obstacle: str | None = None,
) -> str | None:
    """Return why the runs of a model are not captured, or ``None`` if they are to be.

    Args:
        source: the model.
        spec: describes the model.
        capture: the caller's choice; ``None`` captures where possible.
        device: where the model runs.
        obstacle: a reason that the caller already knows.

    Raises:
        OnnxTrainError: if ``capture=True`` and there is an obstacle.
    """
    if capture is False:
        return "capture=False"
    device = find(device)
    if not device.capture_option:
        obstacle = f"the device is {device}"
    elif obstacle is None:
        obstacle = capture_obstacle(runtime.load_graph(source), spec)
    if obstacle is not None and capture:
        raise OnnxTrainError(
            f"cannot capture a step as a CUDA graph: {obstacle}\n"
            "hint: build(..., dims={...}) fixes sizes; capture=None captures where possible"
        )
    return obstacle


def open_session(
    source: bytes | str,
    spec: ModelSpec,
    *,
    device: str | Device,
    threads: int | None,
    capture: bool | None,
    obstacle: str | None = None,
    rest: bool = False,
    profile: str | None = None,
) -> tuple[Any, str | None]:
    """Return a session for a model, and why it does not capture its runs (``None`` if it does).

    Args:
        source: the model.
        spec: describes the model.
        device: where the model runs.
        threads: size of the session's thread pool.
        capture: the caller's choice; ``None`` captures where possible.
        obstacle: a reason against capture that the caller already knows.
        rest: see :func:`onnxtrain.runtime.session.create`.
        profile: see :func:`onnxtrain.runtime.session.create`.

    Raises:
        OnnxTrainError: if ``capture=True`` and there is an obstacle.
    """
    known, device = obstacle is not None, find(device)
    obstacle = check_capture(source, spec, capture, device=device, obstacle=obstacle)
    if device.capture_option and capture is None and obstacle is not None and not known:
        fix = capture_fix(runtime.load_graph(source), spec)
        _warn_once(
            f"steps are not captured as a CUDA graph and take longer: {obstacle}\nhint: {fix}"
        )
    if obstacle is None:
        session, obstacle = create_capturing(
            source, capture=capture, device=device, threads=threads, rest=rest
        )
    else:
        session = runtime.create(source, device=device, threads=threads, rest=rest, profile=profile)
    if not device.is_cpu:
        state = "captured as a CUDA graph" if obstacle is None else f"not captured: {obstacle}"
        logger.info("%s model on %s: runs are %s", spec.role, device, state)
    return session, obstacle


def create_capturing(
    source: bytes | str,
    *,
    capture: bool | None,
    device: str | Device,
    threads: int | None,
    rest: bool = False,
) -> tuple[Any, str | None]:
    """Return a session that captures its runs if all nodes are on the device, else why not.

    Args:
        source: the model; nothing in its graph is an obstacle.
        capture: ``None`` falls back to runs without capture, with a warning that names nodes.
        device: where the model runs.
        threads: size of the session's thread pool.
        rest: see :func:`onnxtrain.runtime.session.create`.

    Raises:
        OnnxTrainError: if ``capture=True`` and nodes run on the CPU.
    """
    try:
        session = runtime.create(source, device=device, threads=threads, capture=True, rest=rest)
    except OnnxTrainError as error:
        if _CAPTURE_ERROR not in str(error):
            raise
    else:
        return session, None
    options = runtime.recording_options(threads)
    session = runtime.create(source, device=device, options=options, rest=rest)
    nodes = runtime.nodes_on_host(session)
    obstacle = f"{len(nodes)} nodes run on the CPU: {', '.join(nodes[:_MAX_LISTED_NODES])}"
    obstacle += ", ..." if len(nodes) > _MAX_LISTED_NODES else ""
    if capture:
        raise OnnxTrainError(
            f"cannot capture a step as a CUDA graph: {obstacle}\n"
            'hint: build(..., target="cuda") generates operators that run on the GPU; '
            "capture=None trains without capture"
        )
    _warn_once(
        f"steps are not captured as a CUDA graph and take longer: {obstacle}\n"
        'hint: build(..., target="cuda") generates operators that run on the GPU'
    )
    return session, obstacle
