"""Find out why a step is slow: time by operator and by module, placement, capture, memory.

:func:`profile_steps` runs steps on a second :class:`~onnxtrain.training.engine.StepEngine` whose
sessions record onnxruntime's own profile, and :class:`StepProfile` is the report. Every kernel is
assigned to

- a phase (forward, backward, update): from the role of its model, and within a model from the
  graph: the nodes behind the loss are forward;
- a module: from the scopes that torch's exporter records, else from the parameter that the node
  reads, else from its name. A backward node without either belongs to the parameter whose gradient
  it leads to, the last one in forward order.

On CUDA, kernels run asynchronously and onnxruntime measures how long a launch takes. Set
``CUDA_LAUNCH_BLOCKING=1`` in the environment to measure the kernels themselves.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console, Group
from rich.table import Table

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io.writer import write_text
from onnxtrain.graph.memory_usage import forward_nodes
from onnxtrain.graph.nodes import captured
from onnxtrain.manifest import Manifest, ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import feed, numpy_dtype
from onnxtrain.runtime.ort_values import cuda_library
from onnxtrain.training.engine import EngineSession, StepEngine

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

PHASES = ("forward", "backward", "update")
_WARMUP_STEPS = 2  # on a device the second run is checked by a third
_KERNEL = "_kernel_time"  # suffix of onnxruntime's event of a node
_COPIES = ("MemcpyFromHost", "MemcpyToHost")
_FLOATS = ("float", "double", "float16", "bfloat16")
_SCOPES = "pkg.torch.onnx.name_scopes"
_ROWS = 12  # rows of a printed table
_DEFAULT_BATCH, _DEFAULT_SIZE = 32, 16
_INTEGER_LIMIT = 2  # random integers are 0 or 1: valid class indices and token ids


@dataclasses.dataclass(frozen=True)
class NodeTime:
    """The time of a node, per step."""

    name: str
    op_type: str
    phase: str
    """``"forward"``, ``"backward"`` or ``"update"``."""
    module: str
    """Path of the module, such as ``layers.0.mlp``; empty at top level."""
    provider: str
    """Execution provider that ran the node."""
    ms: float
    calls: float
    output_bytes: float
    """Bytes written per step."""
    has_float: bool
    """Whether it reads or writes a float tensor of rank 1 or more."""


@dataclasses.dataclass(frozen=True)
class TimeRow:
    """A row of a table of :class:`StepProfile`."""

    name: str
    ms: float
    calls: float
    share: float
    """Fraction of the time of all kernels."""


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Where the time of a training step goes; ``print`` shows tables.

    Attributes:
        nodes: time of each node.
        step_ms: wall time of a step, with the profiler's overhead.
        steps: number of steps measured.
        device: device of the trainer.
        layout: layout of the trainer.
        captured: whether the trainer captures steps as a CUDA graph. Profiled steps never are.
        capture_obstacle: why it does not.
        memory: bytes by purpose.
        events: complete events of a Chrome trace.
    """

    nodes: tuple[NodeTime, ...]
    step_ms: float
    steps: int
    device: str
    layout: str
    captured: bool
    capture_obstacle: str | None
    memory: Mapping[str, int]
    events: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False, default=())

    @property
    def kernel_ms(self) -> float:
        """Time of all kernels per step; kernels of an update may run on several threads."""
        return sum(node.ms for node in self.nodes)

    def by_phase(self) -> list[TimeRow]:
        """Return the time of forward, backward and update."""
        rows = {row.name: row for row in self._group(lambda node: node.phase)}
        return [rows[phase] for phase in PHASES if phase in rows]

    def by_operator(self) -> list[TimeRow]:
        """Return the time by operator type, largest first."""
        return self._group(lambda node: node.op_type)

    def by_module(self) -> list[TimeRow]:
        """Return the time by module, largest first; the empty name is the top level."""
        return self._group(lambda node: node.module)

    def _group(self, key: Callable[[NodeTime], str]) -> list[TimeRow]:
        groups: dict[str, list[NodeTime]] = {}
        for node in self.nodes:
            groups.setdefault(key(node), []).append(node)
        total = self.kernel_ms or 1.0
        rows = [
            TimeRow(name, ms := sum(n.ms for n in nodes), sum(n.calls for n in nodes), ms / total)
            for name, nodes in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.ms)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Nodes with float tensors that run on the CPU though the device is another one."""
        if self.device == "cpu":
            return ()
        return tuple(
            f"{node.op_type} {node.name!r}"
            for node in self.nodes
            if node.provider == "CPUExecutionProvider" and node.has_float
        )

    @property
    def copies(self) -> tuple[NodeTime, ...]:
        """Nodes that copy between host and device."""
        return tuple(node for node in self.nodes if node.op_type in _COPIES)

    def to_dict(self) -> dict[str, Any]:
        """Return the report without events, ready for JSON."""
        fields = ("step_ms", "steps", "device", "layout", "captured", "capture_obstacle")
        return {
            **{name: getattr(self, name) for name in fields},
            "kernel_ms": self.kernel_ms,
            "phases": [dataclasses.asdict(row) for row in self.by_phase()],
            "operators": [dataclasses.asdict(row) for row in self.by_operator()],
            "modules": [dataclasses.asdict(row) for row in self.by_module()],
            "fallbacks": list(self.fallbacks),
            "copies": [dataclasses.asdict(node) for node in self.copies],
            "memory": dict(self.memory),
        }

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, for chrome://tracing or https://ui.perfetto.dev."""
        trace = {"traceEvents": list(self.events), "displayTimeUnit": "ms"}
        write_text(Path(path), json.dumps(trace))

    @property
    def _on_cuda(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    def __rich__(self) -> Group:
        """Return the report for :mod:`rich`."""
        lines = [
            f"step {self.step_ms:.3f} ms, kernels {self.kernel_ms:.3f} ms (mean of {self.steps})",
            f"runs on {self.device}, layout {self.layout}",
        ]
        if self.captured:
            lines.append("captured as a CUDA graph; the profile is of steps without capture")
        elif self._on_cuda:
            lines.append(f"not captured as a CUDA graph: {self.capture_obstacle}")
        if self._on_cuda and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            lines.append("times are of kernel launches; set CUDA_LAUNCH_BLOCKING=1 to time kernels")
        if self.device != "cpu":
            lines.append(f"nodes that fall back to the CPU: {len(self.fallbacks)}")
            lines += [f"  {name}" for name in self.fallbacks[:_ROWS]]
            copied = sum(node.output_bytes for node in self.copies)
            calls = sum(node.calls for node in self.copies)
            lines.append(f"copies inside the graph: {calls:.0f}, {_format_bytes(copied)}")
        lines += [f"{name}: {_format_bytes(size)}" for name, size in self.memory.items()]
        tables = (
            _table("phase", self.by_phase()),
            _table("operator", self.by_operator()),
            _table("module", self.by_module()),
        )
        return Group("\n".join(lines), *tables)

    def __str__(self) -> str:
        """Return the report as text."""
        console = Console(file=io.StringIO(), width=100)
        console.print(self.__rich__(), highlight=False, markup=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _table(title: str, rows: Sequence[TimeRow]) -> Table:
    table = Table(title, "ms", "calls", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows[:_ROWS]:
        name = row.name or "(top level)"
        table.add_row(name, f"{row.ms:.3f}", f"{row.calls:.0f}", f"{row.share:.1%}")
    if rest := rows[_ROWS:]:
        ms, share = sum(row.ms for row in rest), sum(row.share for row in rest)
        calls = sum(row.calls for row in rest)
        table.add_row(f"{len(rest)} more", f"{ms:.3f}", f"{calls:.0f}", f"{share:.1%}")
    return table


def _format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.1f} GiB"


def profile_steps(trainer: Trainer, batch: Any, *, steps: int = 10) -> StepProfile:
    """Return a report of training steps on one batch; the trainer does not change.

    Args:
        trainer: whose models and current values run.
        batch: a tuple of arrays (by position) or a dict of arrays (by name).
        steps: number of steps to average over.
    """
    if steps < 1:
        raise OnnxTrainError(f"steps must be at least 1, got {steps}")
    positional, named = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    feeds = feed(trainer.batch_specs, positional, named)
    with tempfile.TemporaryDirectory() as folder:
        engine = StepEngine(
            trainer.artifacts,
            trainer.layout,
            device=trainer.device_entry,
            threads=trainer.threads,
            capture=False,
            profile=os.path.join(folder, "session"),
        )
        for name in (*trainer.artifacts.values, *trainer.artifacts.state):
            engine.write(name, trainer.view(name))
        for _ in range(_WARMUP_STEPS):
            trainer.run_step(engine, feeds)
        start = time.perf_counter()
        for _ in range(steps):
            trainer.run_step(engine, feeds)
        step_ms = (time.perf_counter() - start) * 1000 / steps
        starts = [entry.session.get_profiling_start_time_ns() for entry in engine.sessions]
        recorded = [
            json.loads(Path(entry.session.end_profiling()).read_text(encoding="utf-8"))
            for entry in engine.sessions
        ]
    nodes: list[NodeTime] = []
    events: list[dict[str, Any]] = []
    memory = dict(engine.memory)
    for entry, records, started in zip(engine.sessions, recorded, starts, strict=True):
        kernels = _measured_kernels(records, entry.runs_per_step * steps)
        labels = NodeLabels.of(trainer.artifacts, entry)
        nodes += node_times(kernels, labels, steps)
        offset = (started - min(starts)) / 1000
        events += _trace_events(kernels, labels, entry.spec, offset)
        arena = max((int(k["args"].get("mem_arena_held", 0)) for k in kernels), default=0)
        if arena:
            name = f"CPU arena of the {entry.spec.role} model"
            memory[name] = max(memory.get(name, 0), arena)
    memory |= _measured_memory(trainer.device)
    return StepProfile(
        tuple(nodes),
        step_ms,
        steps,
        trainer.device,
        trainer.layout,
        trainer.captured,
        trainer.capture_obstacle,
        memory,
        events,
    )


def _measured_kernels(records: Iterable[dict[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Return the kernel events of the last runs of a session, without those of subgraphs.

    A control flow node's event covers the events of its body, which would count twice.
    """
    records = list(records)
    started = sorted(e["ts"] for e in records if e.get("name") == "model_run")[-runs:]
    kernels = sorted(
        (
            e
            for e in records
            if e.get("cat") == "Node" and e["name"].endswith(_KERNEL) and e["ts"] >= started[0]
        ),
        key=lambda e: (e["tid"], e["ts"], -e["dur"]),
    )
    outer: list[dict[str, Any]] = []
    for event in kernels:
        last = outer[-1] if outer else None
        inside = last is not None and last["tid"] == event["tid"]
        if last is None or not inside or event["ts"] >= last["ts"] + max(last["dur"], 1):
            outer.append(event)
        elif event["ts"] + event["dur"] > last["ts"] + last["dur"] + 1:
            outer.append(event)  # clocks are in microseconds: neighbors may touch
    return outer


def node_times(
    kernels: Iterable[Mapping[str, Any]], labels: NodeLabels, steps: int
) -> list[NodeTime]:
    """Return the time of each node from onnxruntime's kernel events."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for event in kernels:
        groups.setdefault(event["name"].removesuffix(_KERNEL), []).append(event)
    times = []
    for name, events in groups.items():
        arguments = events[0]["args"]
        phase, module = labels.find(name)
        shapes = [*arguments.get("input_type_shape", ()), *arguments.get("output_type_shape", ())]
        times.append(
            NodeTime(
                name,
                arguments["op_name"],
                phase,
                module,
                arguments.get("provider", ""),
                sum(e["dur"] for e in events) / 1000 / steps,
                len(events) / steps,
                sum(int(e["args"].get("output_size", 0)) for e in events) / steps,
                any(kind in _FLOATS and len(dims) > 0 for s in shapes for kind, dims in s.items()),
            )
        )
    return times


def _trace_events(
    kernels: Iterable[Mapping[str, Any]], labels: NodeLabels, spec: ModelSpec, offset: float
) -> list[dict[str, Any]]:
    """Return complete events of a Chrome trace, on one clock for all sessions."""
    events = []
    for event in kernels:
        name = event["name"].removesuffix(_KERNEL)
        phase, module = labels.find(name)
        arguments = event["args"]
        events.append(
            {
                "name": f"{arguments['op_name']} {name}",
                "cat": phase,
                "ph": "X",
                "ts": event["ts"] + offset,
                "dur": event["dur"],
                "pid": event["pid"],
                "tid": event["tid"],
                "args": {
                    "model": spec.role,
                    "module": module,
                    "provider": arguments.get("provider", ""),
                    "output_bytes": int(arguments.get("output_size", 0)),
                },
            }
        )
    return events


def _measured_memory(device: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        sizes["peak resident memory of the process"] = peak
    library = cuda_library() if device.startswith("cuda") else None
    if library is not None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if not library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
            sizes["device memory in use, all processes"] = total.value - free.value
    return sizes


class NodeLabels:
    """Phase and module of every node of a model.

    Args:
        model: the model, as it was built.
        spec: describes it.
        manifest: has the parameters.
        executed: the same model after onnxruntime's optimizations, to label fused nodes by their
            outputs.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        spec: ModelSpec,
        manifest: Manifest,
        executed: onnx.ModelProto | None = None,
    ) -> None:
        self._role = spec.role
        weights = (*manifest.parameters, *manifest.buffers)
        self._weights = {w.name: position for position, w in enumerate(weights)}
        self._labels: dict[str, tuple[str, str]] = {}
        self._by_output: dict[str, tuple[str, str]] = {}
        graph = ir.from_proto(model).graph
        forward = forward_nodes(graph) if spec.outputs_of("loss") else set[ir.Node]()
        self._label_forward([node for node in graph if node in forward])
        self._label_backward([node for node in graph if node not in forward], spec)
        self._executed = {
            node.name: tuple(y for y in node.output if y)
            for node in (executed.graph.node if executed is not None else ())
        }

    @classmethod
    def of(cls, artifacts: Artifacts, entry: EngineSession) -> NodeLabels:
        """Return the labels of a session's nodes."""
        executed = runtime.executed_graph(entry.source)
        model = runtime.load_graph(entry.source)
        return cls(model, entry.spec, artifacts.manifest, executed)

    def find(self, name: str) -> tuple[str, str]:
        """Return phase and module of a node by its name at run time."""
        if name in self._labels:
            return self._labels[name]
        for output in self._executed.get(name, ()):  # a fused node keeps the outputs' names
            if output in self._by_output:
                return self._by_output[output]
        # onnxruntime appends to names, and copies to and from a device carry no name of ours.
        for prefix in (name.rstrip("/").rpartition("/")[0], name.rpartition("_")[0]):
            if prefix in self._labels:
                return self._labels[prefix]
        phase = "forward" if self._role in ("gradients", "train", "step") else "update"
        return phase, ""

    def _set(self, node: ir.Node, phase: str, module: str) -> None:
        self._labels[node.name or ""] = phase, module
        for y in node.outputs:
            self._by_output[y.name or ""] = phase, module

    def _module_of_weights(self, node: ir.Node) -> str | None:
        """Return the module of the parameter or buffer that a node reads, if it reads one."""
        for x in (*node.inputs, *captured(node)):
            if x is not None and x.name in self._weights:
                return x.name.rpartition(".")[0]
        return None

    def _label_forward(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            module = _recorded_module(node)
            if module is None:
                module = self._module_of_weights(node)
            if module is None:
                module = _module_of_name(node.name or "")
            self._set(node, "forward", module)

    def _label_backward(self, nodes: Sequence[ir.Node], spec: ModelSpec) -> None:
        """Label the nodes behind gradients and new values, from the outputs backward."""
        leads_to: dict[str, int] = {}  # by value: position of the last weight it contributes to
        parameters = [t.name for t in spec.inputs_of("parameter")]
        gradients = iter(parameters if spec.role in ("gradients", "train") else ())
        fused = {t.feeds for t in spec.outputs_of("parameter")}
        for t in spec.outputs:
            name = t.feeds
            if t.role == "gradient":
                name = next((n for n in gradients if n not in fused), None)
            if name is not None:
                owner = _owner(name, self._weights)
                if owner is not None:
                    leads_to[t.name] = self._weights[owner]
        names = list(self._weights)
        for node in reversed(nodes):
            reached = [leads_to[y.name] for y in node.outputs if y.name in leads_to]
            nearest = max(reached, default=None)
            if nearest is not None:
                for x in (*node.inputs, *captured(node)):
                    if x is not None and x.name:
                        leads_to[x.name] = max(nearest, leads_to.get(x.name, -1))
            module = self._module_of_weights(node)
            if module is None and nearest is not None:
                module = names[nearest].rpartition(".")[0]
            self._set(node, self._late_phase(node, spec), module or "")

    @staticmethod
    def _late_phase(node: ir.Node, spec: ModelSpec) -> str:
        if spec.role not in ("gradients", "train", "step"):
            return "update"
        # The build names nodes of an update after the graph that it adds them to.
        return "update" if (node.name or "").startswith("step/") else "backward"


def _owner(name: str, parameters: Mapping[str, int]) -> str | None:
    """Return the parameter of a tensor: itself, or ``fc.weight`` of ``fc.weight.exp_avg``."""
    while name not in parameters:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def _recorded_module(node: ir.Node) -> str | None:
    """Return the module that torch's exporter recorded for a node, if it did."""
    text = node.metadata_props.get(_SCOPES)
    if not text:
        return None
    try:
        scopes = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return None
    paths = [s for s in scopes[:-1] if isinstance(s, str) and s] if scopes else []
    return paths[-1] if paths else ""


def _module_of_name(name: str) -> str:
    """Return the module from a node's name: ``/layers.0/mlp/MatMul`` is in ``layers.0.mlp``."""
    scope = name.strip("/").rpartition("/")[0]
    # Rewrites name new nodes after the value they compute: MaxPool_output_0/relu.
    parts = [p for p in scope.split("/") if p and not re.search(r"_output_\d+$", p)]
    # Exporters repeat the path: layers/layers.0/mlp.
    kept = [
        p for i, p in enumerate(parts) if not any(q.startswith(f"{p}.") for q in parts[i + 1 :])
    ]
    return ".".join(kept)


def random_batch(
    specs: Sequence[TensorSpec], sizes: Mapping[str, int], batch_size: int | None = None
) -> dict[str, np.ndarray]:
    """Return random arrays for the inputs and targets of a model.

    Args:
        specs: inputs and targets.
        sizes: values of symbolic sizes; others are 16.
        batch_size: value of a symbolic first size, 32 by default.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for spec in specs:
        shape = []
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str):
                default = _DEFAULT_SIZE if axis else batch_size or _DEFAULT_BATCH
                size = sizes.get(size, default)
            shape.append(size)
        dtype = numpy_dtype(spec.dtype)
        if dtype.kind in "iub":
            arrays[spec.name] = rng.integers(0, _INTEGER_LIMIT, shape).astype(dtype)
        else:
            arrays[spec.name] = rng.standard_normal(shape).astype(dtype)
    return arrays
