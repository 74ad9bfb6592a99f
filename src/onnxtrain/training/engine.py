"""The step engine: which models a training step runs, and on which memory.

A layout is a row of the table :data:`LAYOUTS`. All layouts compute the same values; they differ in
the models they run and in how much memory they hold:

========  =============  =====================================  =========================
layout    batch model    its outputs                            update models
========  =============  =====================================  =========================
fused     ``step``       all values, double-buffered            none
separate  ``train``      accumulators, double-buffered;         ``optimizer``
                         running statistics, staged
vector    ``gradients``  gradients; running statistics,         ``scalars``, ``update``
                         staged; with plain SGD, parameters,
                         double-buffered
========  =============  =====================================  =========================

Double-buffered outputs have two copies: a run reads one and writes the other, and ``commit`` swaps
them. Staged outputs are copied by ``commit``.

The life of a step on the CPU (:class:`onnxtrain.runtime.binding.BoundSession` has the life of a
step on CUDA):

1. ``compute`` binds the arrays of the batch without a copy, writes learning rate, step and random
   seed into small fixed arrays, and runs the model per batch. Parameters, state and gradients were
   bound once, when the engine was created. Nothing that the trainer can read has changed yet.
2. ``commit`` makes the results current: it swaps the double-buffered values and copies the staged
   buffers (running statistics).
3. ``update_parameters`` runs the update models, in place where the manifest allows it. The vector
   layout cuts each update into chunks that fit the second-level cache, and shares the chunks among
   threads that sleep between steps.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain import thresholds as T
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError, OnnxTrainError, by_caller
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.binding import Arrays, BoundSession, open_session
from onnxtrain.runtime.devices import Device, find
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.ort_values import Values, as_ort_value, copy_value, ort_value
from onnxtrain.runtime.thread_pool import SleepingPool, Task, available_cores
from onnxtrain.training.sharding import own_update, partition

logger = logging.getLogger(__name__)

_CHUNK_ALIGNMENT = 16  # elements: 64 bytes of float32, one cache line


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which models a step runs, and which of their outputs are double-buffered."""

    batch_model: str
    """Role of the model that runs on every batch."""
    update_model: str | None
    """Role of the models that change parameters; ``None`` if the batch model does it."""
    double_buffered: frozenset[str]
    """Roles of outputs with two copies: a run reads one and writes the other, a commit swaps."""


LAYOUTS: Mapping[str, Layout] = {
    "fused": Layout("step", None, frozenset({"parameter", "buffer", "state"})),
    "separate": Layout("train", "optimizer", frozenset({"gradient"})),
    "vector": Layout("gradients", "update", frozenset({"parameter"})),
}


def choose_layout(
    artifacts: Artifacts, device: str | Device, *, distributed: bool = False
) -> tuple[str, str]:
    """Return the layout of ``layout="auto"``, and the reason for the choice."""
    manifest, device = artifacts.manifest, find(device)
    if distributed:
        if _has_separate_gradients(artifacts, "vector"):
            return "vector", "workers sum the gradients of the gradient model"
        return "separate", "workers sum accumulated gradients"
    if manifest.accumulate > 1:
        return "separate", f"gradients accumulate over {manifest.accumulate} batches"
    # On a device, an update without state does not pay for a second call.
    if manifest.model("gradients") is not None and (device.on_host or artifacts.state):
        return "vector", "the artifacts have update models over vectors"
    if manifest.model("step") is None:
        return "separate", "the artifacts have no step model"
    if not device.on_host:
        return "fused", f"one call per step is cheapest on {device}"
    arrays = (*artifacts.values.values(), *artifacts.state.values())
    size = sum(a.nbytes for a in arrays)
    if size > T.SECOND_COPY_BYTES:
        return "separate", f"a second copy of parameters and state would take {size:,} bytes"
    return "fused", f"a second copy of parameters and state takes only {size:,} bytes"


def _has_separate_gradients(artifacts: Artifacts, layout: str) -> bool:
    """Return whether a layout has gradients between two models, which workers can sum."""
    spec = artifacts.manifest.model(LAYOUTS[layout].batch_model)
    return spec is not None and layout != "fused" and not spec.outputs_of("parameter")


def resolve_layout(
    artifacts: Artifacts, layout: str, device: str | Device, *, distributed: bool = False
) -> str:
    """Return the name of the layout that runs.

    Args:
        artifacts: the models.
        layout: the caller's choice.
        device: where the models run.
        distributed: whether gradients are summed before the update.

    Raises:
        OnnxTrainError: if the layout is unknown, or these artifacts cannot run it.
    """
    if layout == "auto":
        layout, reason = choose_layout(artifacts, device, distributed=distributed)
        logger.info("layout %r on %s: %s", layout, device, reason)
        return layout
    if layout not in LAYOUTS:
        expected = ", ".join(map(repr, ("auto", *LAYOUTS)))
        raise OnnxTrainError(f"unknown layout: {layout!r} (expected one of {expected})")
    manifest = artifacts.manifest
    if manifest.accumulate > 1 and layout != "separate":
        raise OnnxTrainError(
            f"layout={layout!r} cannot accumulate gradients, and these artifacts accumulate over "
            f"{manifest.accumulate} batches\nhint: {_layout_hint('separate')}"
        )
    role = LAYOUTS[layout].batch_model
    if manifest.model(role) is None:
        raise OnnxTrainError(
            f"layout={layout!r} needs a {role} model, and these artifacts have none\n"
            f"hint: {_layout_hint('auto')}"
        )
    if distributed and not _has_separate_gradients(artifacts, layout):
        raise OnnxTrainError(
            f"layout={layout!r} updates in the model of the gradients: several workers cannot sum "
            f"them before\nhint: {_layout_hint('auto')}"
        )
    return layout


def _layout_hint(layout: str) -> str:
    return by_caller(f"Trainer(..., layout={layout!r})", f"--layout {layout}")


def require_spec(artifacts: Artifacts, role: str) -> ModelSpec:
    """Return the manifest's entry of a model.

    Raises:
        CheckpointError: if the artifacts do not have the model.
    """
    spec = artifacts.manifest.model(role)
    if spec is None:
        raise CheckpointError(f"these artifacts have no {role} model\nhint: build them again")
    return spec


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """An update model over vectors, and the tensors that its vectors consist of."""

    spec: ModelSpec
    source: bytes | str
    gradient: str
    """The input that reads gradients."""
    tensors: dict[str, tuple[str, ...]]
    """Tensor names by input. The gradients have the names of their parameters."""

    @property
    def updated(self) -> dict[str, tuple[str, ...]]:
        """The vectors that the update changes."""
        return {key: names for key, names in self.tensors.items() if key != self.gradient}


def update_groups(artifacts: Artifacts) -> list[UpdateGroup]:
    """Return the updates over vectors; none if the gradient model applies plain SGD itself."""
    return [_read_group(artifacts, m) for m in artifacts.manifest.models if m.role == "update"]


def _read_group(artifacts: Artifacts, spec: ModelSpec) -> UpdateGroup:
    (parameter,), (gradient,) = spec.inputs_of("parameter"), spec.inputs_of("gradient")
    tensors = {parameter.name: spec.members, gradient.name: spec.members}
    slots = [
        [s.name for s in artifacts.manifest.state if s.parameter == name] for name in spec.members
    ]
    # The manifest lists state in the order of the model's inputs.
    for t, *names in zip(spec.inputs_of("state"), *slots, strict=True):
        tensors[t.name] = tuple(names)
    return UpdateGroup(spec, artifacts.source_of(spec), gradient.name, tensors)


class Piece(NamedTuple):
    """An update model bound to whole tensors, or to one chunk of vectors."""

    call: BoundSession
    copies: runtime.Copies
    """Results that the model cannot write in place."""


class EngineSession(NamedTuple):
    """A session that an engine runs, for reports."""

    spec: ModelSpec
    source: bytes | str
    session: Any
    device: Device
    runs_per_step: int = 1


class StepEngine:
    """Runs training steps in one layout; the module docstring has the life of a step.

    Args:
        artifacts: the models and the initial values.
        layout: a key of :data:`LAYOUTS`.
        device: where the models run.
        threads: size of the batch model's thread pool, and of the vector update.
        capture: whether to capture steps as CUDA graphs; ``None`` captures where possible.
        release: drop each array of the artifacts once it is copied, so that the values never exist
            twice.
        update: whether to load the update models; without them, only gradients can be computed.
        profile: file prefix for onnxruntime's profiler, which then records every session.
        shard: number of this worker and of all workers, to hold and update a part of the state.
    """

    def __init__(
        self,
        artifacts: Artifacts,
        layout: str,
        *,
        device: str | Device = "cpu",
        threads: int | None = None,
        capture: bool | None = False,
        release: bool = False,
        update: bool = True,
        profile: str | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self._layout, self._device, self._profile = LAYOUTS[layout], find(device), profile
        # State on the host is updated there: a device would copy all of it in and out.
        self._update_device = find("cpu") if self._device.on_host else self._device
        self.sessions = list[EngineSession]()
        self.spec = require_spec(artifacts, self._layout.batch_model)
        role = self._layout.update_model if update else None
        groups = update_groups(artifacts) if role == "update" else []
        optimizer = require_spec(artifacts, role) if role == "optimizer" else None
        self.owners: list[list[str]] = []
        """The parameters that each worker updates, if state is sharded."""
        self._updates_source: bytes | str = b""
        self._absent: dict[str, np.ndarray] = {}
        if optimizer is not None:
            self._updates_source = artifacts.source_of(optimizer)
            self._gradient_inputs = [t.name for t in optimizer.inputs_of("gradient")]
            if shard is not None:
                optimizer = self._shard(artifacts, optimizer, *shard)
        self.control_spec = optimizer or (artifacts.manifest.model("scalars") if groups else None)
        """The model that reads learning rate and step at an update, if there is one."""
        self._allocate(artifacts, groups, update=update, release=release)
        self._pool = SleepingPool(self._update_threads(groups, threads))
        session = self._open_batch_session(artifacts, threads, capture)
        self._scalars = Scalars(artifacts, self.control_spec, self._device) if groups else None
        if optimizer is not None:
            self._updates = self._bind_optimizer(optimizer)
        else:
            self._updates = [self._bind_groups(groups)] * 2
        # Tasks of the pool: chunks in memory of the CPU.
        self._tasks: list[Task] | None = None
        if groups and self._values.on_host:
            self._tasks = [(p.call.session, p.call.binding, p.copies) for p in self._updates[0]]
        elif groups and self._obstacle is None:
            self.update_parameters({})  # captures the updates, which may run more than once
            for name, array in (artifacts.values | artifacts.state).items():
                self.write(name, array)
        banks = range(2 if self._double_buffered else 1)
        self._calls = [self._bind_batch(session, bank) for bank in banks]

    def _shard(self, artifacts: Artifacts, spec: ModelSpec, rank: int, size: int) -> ModelSpec:
        """Keep the updates of this worker only; return the description of their model."""
        manifest = artifacts.manifest
        self.owners = partition(manifest, self._updates_source, spec, size)
        elsewhere = {n for r, names in enumerate(self.owners) if r != rank for n in names}
        absent = [s for s in manifest.state if s.parameter in elsewhere]
        self._absent = {s.name: _zeros(s.shape, s.dtype) for s in absent}
        own = {t.feeds or "" for t in spec.outputs} - elsewhere - {*self._absent}
        self._updates_source, spec = own_update(self._updates_source, spec, own)
        return spec

    def _allocate(
        self, artifacts: Artifacts, groups: Sequence[UpdateGroup], *, update: bool, release: bool
    ) -> None:
        """Allocate the values, their second copies, staged buffers and gradients."""
        start = {**artifacts.values, **artifacts.state}
        start |= {t.name: _zeros(t.shape, t.dtype) for t in self.spec.inputs_of("accumulator")}
        # Accumulators have names of their own, in the order of the parameters.
        self._parameters = [p.name for p in artifacts.manifest.parameters]
        self._accumulators = [t.name for t in self.spec.inputs_of("accumulator")]
        self._inputs = [t.name for t in self.spec.inputs if t.name in start]
        fed, roles = [t for t in self.spec.outputs if t.feeds], self._layout.double_buffered
        self._double_buffered = {t.feeds or "" for t in fed if t.role in roles}
        self._buffers = [t.feeds or "" for t in fed if t.role == "buffer" and t.role not in roles]
        # Members of a vector are neighbors, in the order of the update model.
        vectors = [n for g in groups for names in g.updated.values() for n in names]
        # Parameters of one owner are neighbors, too: they are sent as one vector.
        owned = [n for names in self.owners for n in names]
        order = dict.fromkeys((*vectors, *owned, *self._buffers, *start))
        for name in self._absent:
            del order[name]
        tensors = {n: start[n] for n in order if update or n in self._inputs}
        zeros = {n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in tensors.items()}
        if release:
            start.clear()
            artifacts.release_arrays()
        self._values = Values(tensors, self._device, release=release)
        second = {n: a for n, a in zeros.items() if n in self._double_buffered}
        self._banks, self._now = (self._values, Values(second, self._device)), 0
        self._staged = Values({n: zeros[n] for n in self._buffers}, self._device)
        self._buffer_copies = self._values.copies_from(self._staged, self._buffers)
        members = [n for g in groups for n in g.spec.members]
        self._gradients = Values({n: zeros[n] for n in members}, self._device)
        self._flat_gradients: dict[int, list[tuple[Any, Any]]] = {}

    def _open_batch_session(
        self, artifacts: Artifacts, threads: int | None, capture: bool | None
    ) -> Any:
        source = artifacts.source_of(self.spec)
        obstacle = None
        if self._layout.update_model == "optimizer":
            obstacle = "the separate layout runs the optimizer as a second model"
        session, self._obstacle = open_session(
            source,
            self.spec,
            device=self._device,
            threads=threads,
            capture=capture,
            obstacle=obstacle,
            # Helpers of the update want the cores between two runs: this pool must not spin then.
            rest=self._pool.helpers > 0,
            profile=self._profile,
        )
        self.sessions.append(EngineSession(self.spec, source, session, self._device))
        self._reopen = None
        if not capture:
            self._reopen = functools.cache(
                lambda: runtime.create(source, device=self._device, threads=threads)
            )
        return session

    def _bind_batch(self, session: Any, bank: int) -> BoundSession:
        """Return the batch model, bound to the bank that it reads and the one that it writes."""
        old, new = self._banks[bank], self._banks[1 - bank]
        double = self._double_buffered
        inputs = {n: (old if n in double else self._values)[n] for n in self._inputs}
        outputs: dict[str, Any] = {}
        for t in self.spec.outputs:
            if t.feeds is not None and t.feeds in double:
                outputs[t.name] = new[t.feeds]
            elif t.feeds is not None and t.feeds in self._staged:
                outputs[t.name] = self._staged[t.feeds]
        # Gradients come in the order of the parameters that the model does not update itself.
        if len(self._gradients):
            members = [t.name for t in self.spec.inputs_of("parameter") if t.name not in double]
            gradients = zip(self.spec.outputs_of("gradient"), members, strict=True)
            outputs |= {t.name: self._gradients[n] for t, n in gradients}
        graph_id = bank + 1 if self._obstacle is None else None
        return BoundSession(
            session, self.spec, inputs, outputs, self._device, graph_id, self._reopen
        )

    def _create(
        self, spec: ModelSpec, source: bytes | str, runs_per_step: int = 1, **options: Any
    ) -> Any:
        # One thread: a second pool that spins on the same cores costs more than an update gains.
        session = runtime.create(
            source, device=self._update_device, threads=1, profile=self._profile, **options
        )
        self.sessions.append(
            EngineSession(spec, source, session, self._update_device, runs_per_step)
        )
        return session

    def _bind_optimizer(self, spec: ModelSpec) -> list[list[Piece]]:
        """Return the update over whole tensors, for either bank of accumulators."""
        session = self._create(spec, self._updates_source)
        updated = [t.feeds for t in spec.outputs if t.feeds]
        copied = [n for n in updated if n not in spec.in_place]
        # Views of values on a device are copies: only their shapes are read.
        spare = Values({n: self._values.like(n) for n in copied}, self._device)
        targets = {**self._values, **spare}
        outputs = {t.name: targets[t.feeds or ""] for t in spec.outputs}
        values = {t.name: self._values[t.name] for t in spec.inputs if t.name in self._values}
        accumulators = dict(zip(self._gradient_inputs, self._accumulators, strict=True))
        names = [t.name for t in spec.inputs_of("gradient")]
        updates = []
        for bank in self._banks:
            inputs = values | {n: bank[accumulators[n]] for n in names}
            call = BoundSession(session, spec, inputs, outputs, self._update_device)
            updates.append([Piece(call, self._values.copies_from(spare, copied))])
        return updates

    def _chunks(self, group: UpdateGroup) -> list[tuple[int, int]]:
        """Return start and length of each chunk of a group's vectors; all but the last are equal.

        On the CPU a chunk fits the second-level cache. On a device an update allocates several
        vectors of the chunk's length, so that chunks save memory and take no more time.
        """
        length = self._gradients.length(group.spec.members)
        if self._values.on_host:
            # Rounded, since a short last chunk costs as much as a full one.
            count = round(length / T.UPDATE_CHUNK_ELEMENTS)
        else:
            count = math.ceil(length / T.DEVICE_UPDATE_CHUNK_ELEMENTS)
        size = -(-max(length, 1) // max(count, 1) // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        return [(start, min(size, length - start)) for start in range(0, length, size)]

    def _update_threads(self, groups: Sequence[UpdateGroup], threads: int | None) -> int:
        if not self._values.on_host:
            return 1
        chunks = sum(len(self._chunks(group)) for group in groups)
        most = chunks // T.UPDATE_CHUNKS_PER_THREAD
        return min(available_cores() if threads is None else threads, most)

    def _bind_groups(self, groups: Sequence[UpdateGroup]) -> list[Piece]:
        """Return the updates over vectors, chunk by chunk."""
        pieces: list[Piece] = []
        for group in groups:
            options: dict[str, Any] = {}
            if not self._values.on_host:
                options = {"capture": self._obstacle is None, "planned": False}
            chunks = self._chunks(group)
            session = self._create(group.spec, group.source, len(chunks), **options)
            spares: dict[tuple[str, int], Any] = {}
            for number, (start, count) in enumerate(chunks, 1):
                graph_id = number if options.get("capture") else None
                pieces.append(self._bind_chunk(session, group, start, count, spares, graph_id))
        return pieces

    def _bind_chunk(
        self,
        session: Any,
        group: UpdateGroup,
        start: int,
        count: int,
        spares: dict[tuple[str, int], Any],
        graph_id: int | None,
    ) -> Piece:
        """Return an update bound to one chunk.

        Args:
            session: runs the update model.
            group: the update.
            start: first element of the chunk.
            count: number of elements of the chunk.
            spares: on a device, memory for results by vector and length; chunks share it.
            graph_id: id of the captured run, if runs are captured.
        """
        assert self._scalars is not None
        vectors = {
            key: (self._gradients if key == group.gradient else self._values).flat_view(
                names, start, count
            )
            for key, names in group.tensors.items()
        }
        results: dict[str, Any] = {}
        for key in (k for k in group.updated if k not in group.spec.in_place):
            if self._values.on_host:  # threads run chunks at the same time: each has its own
                results[key] = np.empty_like(vectors[key])
            else:
                if (key, count) not in spares:
                    spares[key, count] = ort_value(np.array(vectors[key].numpy()), self._device)
                results[key] = spares[key, count]
        scalars = {t.name: self._scalars.values[t.name] for t in group.spec.inputs_of("scalar")}
        inputs = {key: as_ort_value(vector) for key, vector in vectors.items()} | scalars
        targets = inputs | {key: as_ort_value(result) for key, result in results.items()}
        outputs = {t.name: targets[t.feeds or ""] for t in group.spec.outputs}
        call = BoundSession(session, group.spec, inputs, outputs, self._update_device, graph_id)
        return Piece(call, [(vectors[key], result) for key, result in results.items()])

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run the batch model beside the current values; return loss, metrics and outputs."""
        return self._calls[self._now].run(feeds)

    def commit(self) -> None:
        """Make the results of the last :meth:`compute` the current values."""
        for target, result in self._buffer_copies:
            copy_value(target, result)
        if self._double_buffered:
            self._now = 1 - self._now

    def update_parameters(self, feeds: Arrays) -> None:
        """Run the update models on the gradients; does nothing if the batch model updates."""
        if self._scalars is not None:
            self._scalars.compute(feeds)
            feeds = {}
        if self._tasks is not None:
            self._pool.run(self._tasks)
            return
        for call, copies in self._updates[self._now]:
            call.run(feeds)
            for target, result in copies:
                copy_value(target, result)

    def gradient_vectors(self, *, pending: bool = True) -> list[tuple[Any, Any]]:
        """Return the gradients as flat vectors, one for each run of equal types.

        Each comes with the vector of the gradients accumulated before this batch, or ``None``.

        Args:
            pending: whether to return those of the last :meth:`compute`, or the committed ones.
        """
        bank = 1 - self._now if pending else self._now
        if bank not in self._flat_gradients:
            if self._accumulators:
                names = self._accumulators
                new, old = (_flat_vectors(self._banks[b], names) for b in (bank, 1 - bank))
                vectors: list[tuple[Any, Any]] = list(zip(new, old, strict=True))
            else:
                flat = _flat_vectors(self._gradients, list(self._gradients))
                vectors = [(vector, None) for vector in flat]
            self._flat_gradients[bank] = vectors
        return self._flat_gradients[bank]

    def skip(self) -> None:
        """Make the next accumulators current without a run; the caller fills them."""
        if self._double_buffered:
            self._now = 1 - self._now

    def bytes_of(self, names: Sequence[str] | None = None) -> Any:
        """Return neighboring tensors as one vector of bytes; all of them by default."""
        return self._values.bytes_of(list(self._values) if names is None else names)

    @property
    def captured(self) -> bool:
        """Whether steps are captured as CUDA graphs and replayed."""
        return self._calls[self._now].captured

    @property
    def capture_obstacle(self) -> str | None:
        """Why steps are not captured as CUDA graphs; ``None`` if they are."""
        return self._calls[self._now].capture_error or self._obstacle

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the tensors that the engine holds between steps, by purpose."""
        parts = {
            "parameters, buffers and state": self._values,
            "second copies": self._banks[1],
            "staged buffers": self._staged,
            "gradients": self._gradients,
        }
        return {purpose: values.nbytes for purpose, values in parts.items() if len(values)}

    def _bank(self, name: str) -> Values:
        return self._banks[self._now] if name in self._double_buffered else self._values

    def view(self, name: str) -> np.ndarray:
        """Return a tensor, valid until the next step.

        Raises:
            OnnxTrainError: if another worker has it.
        """
        if name in self._absent:
            raise OnnxTrainError(
                f"{name!r} is on another worker: shard_state=True\n"
                "hint: trainer.save(path) on all workers writes all state"
            )
        return self._bank(name).view(name)

    def view_or_zeros(self, name: str) -> np.ndarray:
        """Return a tensor; if another worker has it, zeros that take no memory."""
        return self._absent[name] if name in self._absent else self.view(name)

    def has(self, name: str) -> bool:
        """Return whether this worker has a tensor."""
        return name not in self._absent

    def value(self, name: str) -> Any:
        """Return a tensor as an OrtValue, valid until the next step."""
        return self._bank(name)[name]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor."""
        if name in self._values:
            self._bank(name).write(name, array)

    def pending_updates(self) -> list[tuple[str, np.ndarray]]:
        """Return what the last :meth:`compute` found for each parameter, with a description."""
        following = self._banks[1 - self._now]
        accumulators = dict(zip(self._parameters, self._accumulators, strict=False))
        pending = []
        for name in self._parameters:
            if name in self._double_buffered:
                pending.append((f"new value of {name!r}", following.view(name)))
            elif name in accumulators:
                pending.append((f"gradient of {name!r}", following.view(accumulators[name])))
            else:
                pending.append((f"gradient of {name!r}", self._gradients.view(name)))
        return pending


def _flat_vectors(values: Values, names: Sequence[str]) -> list[Any]:
    runs: list[list[str]] = []
    for name in names:
        if runs and values.like(runs[-1][-1]).dtype == values.like(name).dtype:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [values.flat_view(run) for run in runs]


class Scalars:
    """What all updates of a step share, computed on the CPU from learning rate and step.

    Args:
        artifacts: have the model.
        spec: of the model; ``None`` if updates share nothing.
        device: where the updates read the results.
    """

    def __init__(self, artifacts: Artifacts, spec: ModelSpec | None, device: Device) -> None:
        outputs = () if spec is None else spec.outputs
        self._arrays = {t.name: np.array(_zeros(t.shape, t.dtype)) for t in outputs}
        host = {n: ort_value(a) for n, a in self._arrays.items()}
        self._on_device = not device.on_host
        self.values = host
        """The results as OrtValues, which :meth:`compute` writes in place."""
        if self._on_device:
            self.values = {n: ort_value(a, device) for n, a in self._arrays.items()}
        self._sent: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}
        self._call: BoundSession | None = None
        if spec is not None:
            session = runtime.create(artifacts.source_of(spec), threads=1)
            self._call = BoundSession(session, spec, {}, host)

    def compute(self, feeds: Arrays) -> None:
        """Compute the results of one step; a run that would change nothing is skipped."""
        if self._call is not None and feeds != self._last:
            self._call.run(feeds)
            self._last = dict(feeds)
        if not self._on_device:
            return
        for name, array in self._arrays.items():
            if not np.array_equal(array, self._sent.get(name, np.nan)):  # a copy costs a kernel
                self.values[name].update_inplace(array)
                self._sent[name] = np.array(array)


_CONTROL_TYPES = {"lr": np.float32, "rng": np.float32, "grad_scale": np.float32, "reset": np.bool_}


def control_values(
    specs: Sequence[TensorSpec], settings: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the control inputs of a model: learning rate, step, random seed and the like.

    Args:
        specs: of these inputs.
        settings: a value, or several, by role.
    """
    types = {**_CONTROL_TYPES, "step": np.int64}
    return {
        t.name: np.array(
            settings[t.role] if t.role == "rng" else [settings[t.role]],
            np.int32 if t.role == "step" and t.dtype == "int32" else types[t.role],
        )
        for t in specs
    }


def _zeros(shape: Sequence[int | str], dtype: str) -> np.ndarray:
    """Return zeros that take no memory of their own."""
    sizes = tuple(d for d in shape if isinstance(d, int))
    return np.broadcast_to(np.zeros((), numpy_dtype(dtype)), sizes)
