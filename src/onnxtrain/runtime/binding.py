"""A model bound to the memory that it reads and writes.

Whether a run can be recorded once as a CUDA graph and replayed.
"""

from __future__ import annotations

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
from onnxtrain.runtime.ort_values import memory_for, ort_value

Arrays = Mapping[str, np.ndarray]
_CHECKED_RUNS = 2
_NOT_CAPTURED = -1  # the graph id of a run that is neither recorded nor replayed
_WARMED_UP: weakref.WeakSet[Any] = weakref.WeakSet()  # sessions that have run once


class BoundSession:
    """A session with bindings that are made once; each run brings only the batch.

    Args:
        session: runs the model.
        spec: describes it.
        inputs: what is read at each run, by name of the input.
        outputs: where results go, by name of the output; all others come back as arrays.
        device: where the session runs.
        graph_id: of the captured run, if the session captures; each binding has its own.
        reopen: returns a session for the same model that does not capture, in case that the first
            run cannot be recorded; without it, that is an error.
    """

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: str = "cpu",
        graph_id: int | None = None,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        self._parts = (spec, dict(inputs), dict(outputs), device)
        self._reopen = reopen if graph_id is not None else None
        self._in_place = any(y is x for y in outputs.values() for x in inputs.values())
        self._unchecked = 0 if device == "cpu" or self._in_place else _CHECKED_RUNS
        self._bind(session, graph_id)

    @property
    def captured(self) -> bool:
        """Whether runs are recorded and replayed."""
        return self._options is not None

    def _bind(self, session: Any, graph_id: int | None) -> None:
        spec, inputs, outputs, device = self._parts
        self.session, self.binding = session, session.io_binding()
        # What nodes of the CPU read there is copied when it is bound: bound once, it grows stale.
        self._on_host = frozenset[str]() if device == "cpu" else runtime.inputs_on_host(session)
        self._copied = {n: v for n, v in inputs.items() if n in self._on_host}
        self._memory = memory_for(device)
        for name, value in inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        self._memory.prepare(self.binding, spec)
        self._kept: dict[str, Callable[[], np.ndarray]] = {}
        self._fresh: list[str] = []
        for t in spec.outputs:
            if t.name in outputs:
                self.binding.bind_ortvalue_output(t.name, outputs[t.name])
            elif (place := self._memory.place(t)) is not None:
                value, self._kept[t.name] = place
                self.binding.bind_ortvalue_output(t.name, value)
            else:
                self._fresh.append(t.name)
        # Results come in the order in which outputs were bound first.
        self._bound = len(spec.outputs) - len(self._fresh)
        # Never on the CPU: with RunOptions a call costs ten times as much.
        self._options = None if graph_id is None else _capture_options(graph_id)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run on a batch; return the outputs that have no place of their own."""
        for name, array in feeds.items():
            if name in self._on_host:
                self.binding.bind_ortvalue_input(name, ort_value(np.ascontiguousarray(array)))
            else:
                self._memory.feed(self.binding, name, array)
        for name, value in self._copied.items():
            self.binding.bind_ortvalue_input(name, value)
        settling = self._is_warm_up()
        try:
            outputs = self._run(settling)
        except OnnxTrainError as error:
            if self._reopen is None:
                raise
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
        if self._unchecked:
            self._unchecked -= 1
            if not self._unchecked:
                self._check(feeds, outputs)
        return outputs

    def _is_warm_up(self) -> bool:
        """Return whether the next run is the session's first, which is not recorded.

        Only that one: memory given back later may be what another binding has recorded. A model
        that writes over its inputs has none of its own, and is recorded at once by those who
        expect that the recording runs more than once.
        """
        recorded = self._options is not None and not self._in_place
        return recorded and self.session not in _WARMED_UP

    def _run(self, settling: bool) -> dict[str, np.ndarray]:
        for name in self._fresh:
            # Again each time: the last result would be taken for memory to write to.
            self.binding.bind_output(name, "cpu")
        runtime.run_bound(
            self.session, self.binding, _warm_up_options() if settling else self._options
        )
        outputs = {name: read() for name, read in self._kept.items()}
        if self._fresh:
            results = self.binding.get_outputs()[self._bound :]
            outputs.update({n: r.numpy() for n, r in zip(self._fresh, results, strict=True)})
        return outputs

    def _check(self, feeds: Arrays, outputs: dict[str, np.ndarray]) -> None:
        """Run a later step again with bindings made anew; refuse to go on if its loss is another.

        A device that reads values as they were when they were bound is right in its first step
        only. This costs one step more, once.
        """
        spec, inputs, places, device = self._parts
        again = BoundSession(self.session, spec, inputs, places, device)
        again._options = None if self._options is None else _capture_options(_NOT_CAPTURED)
        again._unchecked = 0
        self._parts = (spec, {}, {}, device)
        wanted = again.run(feeds)
        names = [t.name for t in spec.outputs_of("loss")]
        if _all_close(outputs, wanted, names) or not _all_close(again.run(feeds), wanted, names):
            return  # the latter: the model draws random numbers of its own
        raise OnnxTrainError(
            f"{device} computes with old values: in run {_CHECKED_RUNS} the loss is "
            f"{[outputs[n].item() for n in names]}, with bindings made anew it is "
            f"{[wanted[n].item() for n in names]}\n"
            "hint: a defect of the bindings; please report it, and train on the CPU"
        )


def _all_close(a: Arrays, b: Arrays, names: list[str]) -> bool:
    return all(np.allclose(a[n], b[n], 1e-2, 1e-3, equal_nan=True) for n in names)


def _capture_options(graph_id: int) -> Any:
    options = runtime.import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


def _warm_up_options() -> Any:
    """Return the options of the first run, which is not recorded and gives its memory back.

    It takes each tensor's memory as it comes, and finds out what all take together; the next run
    takes one block of that size. What the first one had would stay beside it.
    """
    return runtime.shrink_arena_options(_NOT_CAPTURED)


_CAPTURE_ERROR = "graph capture feature"  # from onnxruntime's words where a node is on the CPU
_MAX_LISTED_NODES = 5
_SIZES = ("Shape", "Size")  # of values whose sizes are known nothing is left of them
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def capture_obstacle(model: onnx.ModelProto, spec: ModelSpec) -> str | None:
    """Return what stands against a recording, or ``None``.

    A replay repeats kernels and addresses: every size must be fixed, and nothing may branch.
    """
    for t in (*spec.inputs, *spec.outputs):
        free = [d for d in t.shape if not isinstance(d, int)]
        if free:
            return f"{t.name!r} has free sizes: {', '.join(map(str, free))}"
    for node in model.graph.node:
        if any(a.type in _GRAPHS for a in node.attribute):
            return f"{node.op_type} {node.name!r} has a body"
        if node.op_type in _SIZES:
            return f"{node.op_type} {node.name!r} computes a size that is not known before"
        if node.op_type == "Concat" and len(node.input) > T.CUDA_GRAPH_CONCAT_INPUTS:
            return f"Concat {node.name!r} joins more than {T.CUDA_GRAPH_CONCAT_INPUTS} tensors"
    return None


def can_capture(
    model: onnx.ModelProto | None, spec: ModelSpec | None, wanted: bool | None, *, device: str
) -> bool:
    """Return whether the steps of a run are to be recorded.

    Args:
        model: what is to be run at each step; ``None`` if gradients are accumulated in between.
        spec: describes it.
        wanted: ``None`` records where that can be done.
        device: where it runs.

    Raises:
        OnnxTrainError: if it was asked for and cannot be done, with the reason.
    """
    if wanted is False or (wanted is None and device != "cuda"):
        return False
    if device != "cuda":
        reason = f"the device is {device}"
    elif model is None or spec is None:
        reason = "gradients are accumulated, and the update is a model of its own"
    else:
        reason = capture_obstacle(model, spec)
    if reason is not None and wanted:
        raise OnnxTrainError(
            f"a step cannot be captured: {reason}\n"
            "hint: build(..., dims={...}) fixes sizes; capture=None captures where it can"
        )
    return reason is None


def create_capturing(
    source: bytes | str,
    *,
    requested: bool | None,
    device: str,
    threads: int | None,
    rest: bool = False,
) -> tuple[Any, bool]:
    """Return a session that records its runs if all nodes are on the device, and whether it does.

    Args:
        source: the model, which nothing in its graph keeps from being recorded.
        requested: ``None`` falls back to runs without capture, with a warning that names nodes.
        device: where it runs.
        threads: of the session's pool.
        rest: see :func:`onnxtrain.runtime.session.create`.

    Raises:
        OnnxTrainError: if a recording was asked for, and nodes are on the CPU.
    """
    try:
        created = runtime.create(source, device=device, threads=threads, capture=True, rest=rest)
    except OnnxTrainError as error:
        if _CAPTURE_ERROR not in str(error):
            raise
    else:
        return created, True
    options = runtime.recording_options(threads)
    session = runtime.create(source, device=device, options=options, rest=rest)
    nodes = runtime.nodes_on_host(session)
    text = f"{len(nodes)} nodes run on the CPU: {', '.join(nodes[:_MAX_LISTED_NODES])}"
    text += ", ..." if len(nodes) > _MAX_LISTED_NODES else ""
    if requested:
        raise OnnxTrainError(
            f"a step cannot be captured: {text}\n"
            'hint: build(..., target="cuda") has forms for the device; capture=None runs without'
        )
    warnings.warn(f"steps are not captured as a CUDA graph: {text}", stacklevel=2)
    return session, False
