"""Two ways to run a step, which give the same numbers.

``Fused`` runs one graph from old values to new ones and swaps two sets of buffers. ``Separate``
runs gradients and update as two graphs; the update may write in place, which saves a copy of all.
Both compute first and change nothing until ``commit``.

Training on one long vector: plain gradients, then the update in place, a piece at a time.

Updates over long vectors: on the CPU piece by piece in the cache, on a device all at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from onnxtrain import thresholds as T
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError
from onnxtrain.manifest import ModelSpec, TensorSpec, WeightSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.binding import Arrays, BoundSession, can_capture, create_capturing
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.ort_values import Values, ort_value
from onnxtrain.runtime.thread_pool import SleepingPool, Task, available_cores


class TensorStore(Protocol):
    """What a trainer needs to read and set."""

    spec: ModelSpec

    def view(self, name: str) -> np.ndarray:
        """Return a parameter, buffer or state tensor, valid until the next step."""
        ...

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a parameter, buffer or state tensor."""
        ...


def pick_layout(artifacts: Artifacts, device: str) -> str:
    """Return the name of the layout that costs least, where no vectors are possible."""
    manifest = artifacts.manifest
    if manifest.accumulate > 1 or manifest.model("step") is None:
        return "separate"
    if device != "cpu":
        return "fused"  # the update is not worth a second call
    arrays = (*artifacts.values.values(), *artifacts.state.values())
    return "separate" if sum(a.nbytes for a in arrays) > T.SECOND_COPY_BYTES else "fused"


class FusedEngine:
    """One graph per step, two sets of buffers in turn; they are never the same memory."""

    def __init__(
        self,
        artifacts: Artifacts,
        *,
        device: str,
        threads: int | None,
        capture: bool | None = False,
    ) -> None:
        self.spec = require_spec(artifacts, "step")
        source = artifacts.source("step")
        session, recorded = open_session(
            source, self.spec, device=device, threads=threads, capture=capture
        )
        self.sources = (source,)
        reopen = None if capture else session_opener(source, device=device, threads=threads)
        start = {**artifacts.values, **artifacts.state}
        kept = {t.name: start[t.name] for t in self.spec.inputs if t.name in start}
        self._sets = [Values(kept, device), Values(kept, device)]
        self._now = 0
        feeds = {t.name: t.feeds for t in self.spec.outputs if t.feeds is not None}
        self._calls = [
            BoundSession(
                session,
                self.spec,
                old,
                {y: new[x] for y, x in feeds.items()},
                device,
                graph_id,
                reopen,
            )
            for old, new, graph_id in (
                (*self._sets, 1 if recorded else None),
                (*self._sets[::-1], 2 if recorded else None),
            )
        ]

    @property
    def captured(self) -> bool:
        """Whether steps are recorded and replayed."""
        return self._calls[self._now].captured

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run one step beside the current values; return loss, metrics and outputs."""
        return self._calls[self._now].run(feeds)

    def commit(self) -> None:
        """Make the computed values the current ones."""
        self._now = 1 - self._now

    def describe_updates(self, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
        """Return what the last computation found for each parameter, with words for it."""
        new = self._sets[1 - self._now]
        return [(f"new value of {n!r}", new.view(n)) for n in names]

    def view(self, name: str) -> np.ndarray:
        """Return a tensor, valid until the next step."""
        return self._sets[self._now].view(name)

    def value(self, name: str) -> Any:
        """Return what the runtime takes for a tensor, valid until the next step."""
        return self._sets[self._now][name]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor; both sets, since no step replaces what is only read."""
        for values in self._sets:
            if name in values:
                values.write(name, array)


class SeparateEngine:
    """A gradient graph that accumulates, and an optimizer graph.

    Args:
        artifacts: the models and the values to start with.
        device: where they run.
        threads: of the gradient graph's pool.
        in_place: let the optimizer write over old values where the manifest says that it may.
    """

    def __init__(
        self,
        artifacts: Artifacts,
        *,
        device: str,
        threads: int | None,
        in_place: bool = True,
    ) -> None:
        self.spec, self.update = (
            require_spec(artifacts, "train"),
            require_spec(artifacts, "optimizer"),
        )
        self._device, self.captured = device, False
        self.sources = (artifacts.source("train"), artifacts.source("optimizer"))
        train = runtime.create(artifacts.source("train"), device=device, threads=threads)
        # Two pools that spin on the same cores cost more than the update can gain.
        optimizer = runtime.create(artifacts.source("optimizer"), device=device, threads=1)
        start = {**artifacts.values, **artifacts.state}
        own = {t.name for t in (*self.spec.inputs, *self.update.inputs)}
        self._values = Values({n: a for n, a in start.items() if n in own}, device)
        self._gradient_names = [t.name for t in self.spec.inputs if t.role == "accumulator"]
        zeros = {
            t.name: np.zeros(_sizes(t.shape), numpy_dtype(t.dtype))
            for t in self.spec.inputs_of("accumulator")
        }
        self._gradients = [Values(zeros, device), Values(zeros, device)]
        self._now = 0
        self._buffers = [t.feeds or "" for t in self.spec.outputs_of("buffer")]
        self._fresh = Values({n: start[n] for n in self._buffers}, device)
        self._train = [
            self._bind_train(train, old, new)
            for old, new in (self._gradients, self._gradients[::-1])
        ]
        changing = [t.feeds for t in self.update.outputs if t.feeds]
        self.in_place = set(self.update.in_place) if in_place else set[str]()
        self._spare = Values({n: start[n] for n in changing if n not in self.in_place}, device)
        self._update = [self._bind_update(optimizer, grads) for grads in self._gradients]

    def _bind_train(self, session: object, old: Values, new: Values) -> BoundSession:
        own = {t.name: self._values[t.name] for t in self.spec.inputs if t.name in self._values}
        outputs = {t.name: new[t.feeds or ""] for t in self.spec.outputs_of("gradient")}
        outputs |= {t.name: self._fresh[t.feeds or ""] for t in self.spec.outputs_of("buffer")}
        return BoundSession(session, self.spec, {**own, **old}, outputs, self._device)

    def _bind_update(self, session: object, gradients: Values) -> BoundSession:
        inputs = {
            t.name: self._values[t.name] for t in self.update.inputs if t.name in self._values
        }
        # The same parameters in the same order, under the names of another graph.
        names = (t.name for t in self.update.inputs_of("gradient"))
        inputs |= {n: gradients[a] for n, a in zip(names, self._gradient_names, strict=True)}
        targets = {**self._values, **self._spare}
        outputs = {t.name: targets[t.feeds or ""] for t in self.update.outputs}
        return BoundSession(session, self.update, inputs, outputs, self._device)

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run the gradient graph on one batch; return loss, metrics and outputs."""
        return self._train[self._now].run(feeds)

    def commit(self) -> None:
        """Take over the accumulated gradients and the new buffers."""
        self._now = 1 - self._now
        self._values.copy_from(self._fresh, self._buffers)

    def update_parameters(self, feeds: Arrays) -> None:
        """Run the optimizer graph on the accumulated gradients."""
        self._update[self._now].run(feeds)
        self._values.copy_from(self._spare, list(self._spare))

    def gradients(self, *, computed: bool = False) -> list[np.ndarray]:
        """Return the accumulated gradients in the order of the parameters.

        Args:
            computed: those of the last computation, which are not taken over yet.
        """
        values = self._gradients[1 - self._now if computed else self._now]
        return [values.view(n) for n in self._gradient_names]

    def describe_updates(self, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
        """Return what the last computation found for each parameter, with words for it."""
        gradients = zip(names, self.gradients(computed=True), strict=True)
        return [(f"gradient of {n!r}", g) for n, g in gradients]

    def view(self, name: str) -> np.ndarray:
        """Return a tensor, valid until the next step."""
        return self._values.view(name)

    def value(self, name: str) -> Any:
        """Return what the runtime takes for a tensor, valid until the next step."""
        return self._values[name]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor."""
        if name in self._values:
            self._values.write(name, array)


def open_session(
    source: bytes | str,
    spec: ModelSpec,
    *,
    device: str,
    threads: int | None,
    capture: bool | None,
    rest: bool = False,
) -> tuple[Any, bool]:
    """Return a session for a model, and whether it records its runs.

    Args:
        source: the model.
        spec: describes it.
        device: where it runs.
        threads: of the session's pool.
        capture: ``None`` records where that can be done.
        rest: see :func:`onnxtrain.runtime.session.create`.
    """
    requested = capture is not False and (capture or device == "cuda")
    if requested and can_capture(load_graph(source), spec, capture, device=device):
        return create_capturing(
            source, requested=capture, device=device, threads=threads, rest=rest
        )
    return runtime.create(source, device=device, threads=threads, rest=rest), False


def session_opener(source: bytes | str, *, device: str, threads: int | None) -> Callable[[], Any]:
    """Return what makes a session that does not record, once however often it is asked."""
    return functools.cache(lambda: runtime.create(source, device=device, threads=threads))


def require_spec(artifacts: Artifacts, role: str) -> ModelSpec:
    """Return the entry of a model that has to be there."""
    spec = artifacts.manifest.model(role)
    if spec is None:
        raise CheckpointError(f"these artifacts have no {role} model\nhint: build them again")
    return spec


_CONTROL_TYPES = {"lr": np.float32, "rng": np.float32, "grad_scale": np.float32, "reset": np.bool_}


def control_values(
    specs: Sequence[TensorSpec], numbers: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the inputs that a trainer sets by itself.

    Args:
        specs: of these inputs.
        numbers: a number or several by role.
    """
    types = {**_CONTROL_TYPES, "step": np.int64}
    return {
        t.name: np.array(
            numbers[t.role] if t.role == "rng" else [numbers[t.role]],
            np.int32 if t.role == "step" and t.dtype == "int32" else types[t.role],
        )
        for t in specs
    }


def _sizes(shape: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(d for d in shape if isinstance(d, int))


def load_graph(source: bytes | str) -> onnx.ModelProto:
    """Return the graph of a model, without weights that lie in other files."""
    if isinstance(source, str):
        return onnx.load(source, load_external_data=False)
    return onnx.load_from_string(source)


_ALIGNED = 16  # elements


@dataclasses.dataclass(frozen=True)
class VectorUpdate:
    """A model over vectors, and the tensors that its vectors are made of."""

    spec: ModelSpec
    source: bytes | str
    gradient: str
    """The input that takes gradients."""
    tensors: dict[str, tuple[str, ...]]
    """By input: the tensors of all members. Gradients go by the names of the parameters."""

    @property
    def changing(self) -> dict[str, tuple[str, ...]]:
        """Those of ``tensors`` that the update changes."""
        return {key: names for key, names in self.tensors.items() if key != self.gradient}


@dataclasses.dataclass(frozen=True)
class VectorUpdates:
    """All updates of a step, and the model that computes the scalars that they share."""

    groups: tuple[VectorUpdate, ...]
    scalars: ModelSpec
    source: bytes | str

    @classmethod
    def of(cls, artifacts: Artifacts) -> VectorUpdates:
        """Return what the manifest lists; there may be nothing left to update."""
        manifest = artifacts.manifest
        specs = [m for m in manifest.models if m.role == "update"]
        scalars = manifest.model("scalars")
        return cls(
            tuple(_read_update(artifacts, spec) for spec in specs),
            ModelSpec("scalars", "", (), ()) if scalars is None else scalars,
            b"" if scalars is None else artifacts.source_of(scalars),
        )


def _read_update(artifacts: Artifacts, spec: ModelSpec) -> VectorUpdate:
    (parameter,), (gradient,) = spec.inputs_of("parameter"), spec.inputs_of("gradient")
    tensors = {parameter.name: spec.members, gradient.name: spec.members}
    slots = [
        [s.name for s in artifacts.manifest.state if s.parameter == name] for name in spec.members
    ]
    # State is in the order of the manifest.
    for t, *names in zip(spec.inputs_of("state"), *slots, strict=True):
        tensors[t.name] = tuple(names)
    return VectorUpdate(spec, artifacts.source_of(spec), gradient.name, tensors)


class Scalars:
    """What all updates of a step share, computed from learning rate and step on the CPU."""

    def __init__(self, updates: VectorUpdates) -> None:
        spec = updates.scalars
        self.arrays = {
            t.name: np.zeros([int(d) for d in t.shape], numpy_dtype(t.dtype)) for t in spec.outputs
        }
        """The results by name; :meth:`compute` writes them in place."""
        self._last: dict[str, np.ndarray] = {}
        self._call: BoundSession | None = None
        if self.arrays:
            session = runtime.create(updates.source, threads=1)
            outputs = {n: ort_value(a) for n, a in self.arrays.items()}
            self._call = BoundSession(session, spec, {}, outputs)

    def compute(self, feeds: Arrays) -> None:
        """Set :attr:`arrays` for one step; nothing is done if that changes nothing."""
        if self._call is not None and feeds != self._last:
            self._call.run(feeds)
            self._last = dict(feeds)


class VectorUpdater:
    """Runs updates over all pieces of the vectors, in memory of the CPU.

    Args:
        updates: the models.
        values: parameters and state, written in place.
        gradients: by the names of the parameters.
        threads: that may share the pieces; ``None`` for one per core.
    """

    def __init__(
        self,
        updates: VectorUpdates,
        values: Values,
        gradients: Values,
        *,
        threads: int | None,
    ) -> None:
        self._scalars = Scalars(updates)
        self._pieces: list[Task] = []
        for group in updates.groups:
            session = runtime.create(group.source, threads=1)
            lines = {
                key: (gradients if key == group.gradient else values).line(names)
                for key, names in group.tensors.items()
            }
            length = len(lines[group.gradient])
            # Equal parts: a run costs the same for a rest of a few elements.
            parts = max(round(length / T.UPDATE_CHUNK_ELEMENTS), 1)
            size = -(-max(length, 1) // parts // _ALIGNED) * _ALIGNED
            for start in range(0, length, size):
                part = {key: line[start : start + size] for key, line in lines.items()}
                self._pieces.append(self._bind(session, group, part))
        most = len(self._pieces) // T.UPDATE_CHUNKS_PER_THREAD
        self._crew = SleepingPool(min(available_cores() if threads is None else threads, most))

    @property
    def shared(self) -> bool:
        """Whether other threads work on the pieces too."""
        return self._crew.helpers > 0

    def _bind(self, session: Any, group: VectorUpdate, part: dict[str, np.ndarray]) -> Task:
        """Return a session bound to one piece, and what to copy after it ran."""
        copies = {
            key: np.empty_like(part[key])
            for key in group.changing
            if key not in group.spec.in_place
        }
        inputs = {key: ort_value(array) for key, array in part.items()}
        for t in group.spec.inputs_of("scalar"):
            inputs[t.name] = ort_value(self._scalars.arrays[t.name])
        places = inputs | {key: ort_value(array) for key, array in copies.items()}
        outputs = {t.name: places[t.feeds or ""] for t in group.spec.outputs}
        bound = BoundSession(session, group.spec, inputs, outputs)
        return bound.session, bound.binding, [(part[key], a) for key, a in copies.items()]

    def run(self, feeds: Arrays) -> None:
        """Update everything; ``feeds`` are learning rate and step."""
        if self._pieces:
            self._scalars.compute(feeds)
            self._crew.run(self._pieces)


class DeviceVectorUpdater:
    """Runs each update over large pieces of the vectors, in memory of a device.

    What an update computes on the way is as long as what it updates, and several vectors of it:
    in pieces it takes little memory, and no more time.

    Args:
        updates: the models.
        values: parameters and state, written in place.
        gradients: by the names of the parameters.
        device: where they are.
        capture: record the runs and replay them. The recording itself may run an update more than
            once, and is made here: the caller sets the values after it.
    """

    shared = False
    """No thread of the CPU works on it."""

    def __init__(
        self,
        updates: VectorUpdates,
        values: Values,
        gradients: Values,
        device: str,
        *,
        capture: bool,
    ) -> None:
        self._scalars, self._device, self._capture = Scalars(updates), device, capture
        self._shared = {n: ort_value(a, device) for n, a in self._scalars.arrays.items()}
        self._sent: dict[str, np.ndarray] = {}
        self._calls: list[tuple[BoundSession, list[tuple[Any, Any]]]] = []
        for group in updates.groups:
            session = runtime.create(
                group.source, device=device, threads=1, capture=capture, planned=False
            )
            homes = {
                key: (gradients if key == group.gradient else values, names)
                for key, names in group.tensors.items()
            }
            length = gradients.length(group.tensors[group.gradient])
            spares: dict[tuple[str, int], Any] = {}
            for number, (start, count) in enumerate(_split_vector(length), 1):
                lines = {k: v.line_value(names, start, count) for k, (v, names) in homes.items()}
                self._calls.append(self._bind(session, group, lines, spares, number))
        if capture:
            self._run()

    def _bind(
        self,
        session: Any,
        group: VectorUpdate,
        lines: dict[str, Any],
        spares: dict[tuple[str, int], Any],
        number: int,
    ) -> tuple[BoundSession, list[tuple[Any, Any]]]:
        """Return a session bound to one piece, and what to copy after it ran."""
        own = {}
        for key in group.changing:
            if key not in group.spec.in_place:
                count = lines[key].shape()[0]
                if (key, count) not in spares:  # pieces of one length take it in turn
                    spares[key, count] = ort_value(np.array(lines[key].numpy()), self._device)
                own[key] = spares[key, count]
        places = {**lines, **own}
        outputs = {t.name: places[t.feeds or ""] for t in group.spec.outputs}
        scalars = {t.name: self._shared[t.name] for t in group.spec.inputs_of("scalar")}
        graph_id = number if self._capture else None
        call = BoundSession(session, group.spec, lines | scalars, outputs, self._device, graph_id)
        return call, [(lines[k], v) for k, v in own.items()]

    def run(self, feeds: Arrays) -> None:
        """Update everything; ``feeds`` are learning rate and step."""
        self._scalars.compute(feeds)
        self._run()

    def _run(self) -> None:
        for name, value in self._shared.items():
            array = self._scalars.arrays[name]
            if not np.array_equal(array, self._sent.get(name, np.nan)):  # a copy costs a kernel
                value.update_inplace(array)
                self._sent[name] = np.array(array)
        for call, copies in self._calls:
            call.run({})
            for target, source in copies:
                target.update_inplace(source)


def _split_vector(length: int) -> list[tuple[int, int]]:
    """Return where each piece of a vector starts, and its length; all but the last are equal."""
    parts = max(-(-length // T.DEVICE_UPDATE_CHUNK_ELEMENTS), 1)
    size = -(-max(length, 1) // parts // _ALIGNED) * _ALIGNED
    return [(start, min(size, length - start)) for start in range(0, length, size)]


class VectorEngine:
    """Gradients of one batch and an update over vectors; :func:`vector_layout` says when.

    Args:
        artifacts: the models and the values to start with.
        device: where they run.
        threads: of the gradient graph's pool, and of the update.
        capture: record the runs of a device; ``None`` does where that can be done.
        release: on the CPU, let go of the artifacts' values while they are copied.
    """

    def __init__(
        self,
        artifacts: Artifacts,
        *,
        device: str,
        threads: int | None,
        capture: bool | None = False,
        release: bool = False,
    ) -> None:
        self.spec = require_spec(artifacts, "gradients")
        updates = VectorUpdates.of(artifacts)
        self.update = updates.scalars
        source = artifacts.source_of(self.spec)
        self.sources = (source, *(g.source for g in updates.groups))
        self._device = device
        self._results = {t.feeds or "": t.name for t in self.spec.outputs_of("parameter")}
        self._buffers = [t.feeds or "" for t in self.spec.outputs_of("buffer")]
        self._allocate(artifacts, updates, release=release and device == "cpu")
        session, self._recorded = None, False
        if device != "cpu":
            session, self._recorded = open_session(
                source, self.spec, device=device, threads=threads, capture=capture
            )
        self._reopen = None if capture else session_opener(source, device=device, threads=threads)
        self._updater = self._make_updater(updates, threads)
        if device != "cpu":  # a recording may have changed them
            for name, array in (artifacts.values | artifacts.state).items():
                self.write(name, array)
        if session is None:
            rest = self._updater.shared
            session = runtime.create(source, device=device, threads=threads, rest=rest)
        # Values that a step gives whole have two homes in turn; all others are changed in place.
        homes = (self._homes, self._homes[::-1])[: 2 if self._results else 1]
        self._calls = [self._bind(session, old, new) for old, new in homes]

    def _allocate(self, artifacts: Artifacts, updates: VectorUpdates, *, release: bool) -> None:
        """Make room for values, results and gradients, neighbours where updates want vectors."""
        start = {**artifacts.values, **artifacts.state}
        vectors = [n for g in updates.groups for names in g.changing.values() for n in names]
        order = dict.fromkeys((*vectors, *self._buffers, *start))
        known = {p.name: p for p in artifacts.manifest.parameters}
        lines = [n for g in updates.groups for n in g.spec.members]
        self._fresh = Values({n: start[n] for n in self._buffers}, self._device)
        taken = {n: start[n] for n in order}
        if release:
            start.clear()
            artifacts.forget()
        self._values = Values(taken, self._device, release=release)
        self._gradient = Values({n: _zeros(known[n]) for n in lines}, self._device)
        results = Values({n: _zeros(known[n]) for n in self._results}, self._device)
        self._homes = (self._values, results)
        self._now = 0

    def _make_updater(
        self, updates: VectorUpdates, threads: int | None
    ) -> VectorUpdater | DeviceVectorUpdater:
        if self._device == "cpu":
            return VectorUpdater(updates, self._values, self._gradient, threads=threads)
        return DeviceVectorUpdater(
            updates, self._values, self._gradient, self._device, capture=self._recorded
        )

    def _bind(self, session: object, old: Values, new: Values) -> BoundSession:
        """Return the gradient graph, bound to the home that it reads and the one it writes."""
        inputs = {t.name: self._values[t.name] for t in self.spec.inputs if t.name in self._values}
        inputs |= {n: old[n] for n in self._results}
        parameters = (t.name for t in self.spec.inputs_of("parameter"))
        rest = (n for n in parameters if n not in self._results)
        gradients = zip(self.spec.outputs_of("gradient"), rest, strict=True)
        outputs = {t.name: self._gradient[n] for t, n in gradients}
        outputs |= {t.name: self._fresh[t.feeds or ""] for t in self.spec.outputs_of("buffer")}
        outputs |= {y: new[n] for n, y in self._results.items()}
        graph_id = 1 if self._recorded else None
        return BoundSession(
            session, self.spec, inputs, outputs, self._device, graph_id, self._reopen
        )

    @property
    def captured(self) -> bool:
        """Whether gradients are recorded and replayed."""
        return self._calls[self._now if len(self._calls) > 1 else 0].captured

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run the gradient graph on one batch; return loss, metrics and outputs."""
        return self._calls[self._now].run(feeds)

    def commit(self) -> None:
        """Take over the new buffers, and new values where they are there already."""
        self._values.copy_from(self._fresh, self._buffers)
        if self._results:
            self._now = 1 - self._now

    def update_parameters(self, feeds: Arrays) -> None:
        """Update all parameters with the gradients."""
        self._updater.run(feeds)

    def describe_updates(self, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
        """Return what the last computation found for each parameter, with words for it."""
        new = self._homes[1 - self._now]
        return [
            (f"new value of {n!r}", new.view(n))
            if n in self._results
            else (f"gradient of {n!r}", self._gradient.view(n))
            for n in names
        ]

    def view(self, name: str) -> np.ndarray:
        """Return a tensor, valid until the next step."""
        return self._home(name).view(name)

    def value(self, name: str) -> Any:
        """Return what the runtime takes for a tensor, valid until the next step."""
        return self._home(name)[name]

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor."""
        if name in self._values:
            self._home(name).write(name, array)

    def _home(self, name: str) -> Values:
        return self._homes[self._now] if name in self._results else self._values


def create_vector_engine(
    artifacts: Artifacts,
    *,
    device: str = "cpu",
    threads: int | None,
    capture: bool | None = False,
    release: bool = False,
) -> VectorEngine | None:
    """Return the layout if the artifacts have the models for it and no batches are accumulated.

    Args:
        artifacts: the models and the values to start with.
        device: where they run.
        threads: of the gradient graph's pool, and of the update.
        capture: see :class:`onnxtrain.training.trainer.Trainer`.
        release: on the CPU, let go of the artifacts' values while they are copied: all of them
            are never there twice.
    """
    spec = artifacts.manifest.model("gradients")
    if spec is None or artifacts.manifest.accumulate > 1:
        return None
    if capture and device == "cpu":
        can_capture(None, spec, capture, device=device)
    return VectorEngine(artifacts, device=device, threads=threads, capture=capture, release=release)


def _zeros(like: WeightSpec) -> np.ndarray:
    """Return zeros that take no memory of their own."""
    return np.broadcast_to(np.zeros((), numpy_dtype(like.dtype)), like.shape)
