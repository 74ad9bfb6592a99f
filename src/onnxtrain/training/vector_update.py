"""Updates over long vectors: on the CPU piece by piece in the cache, on a device all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from onnxtrain import thresholds as T
from onnxtrain.artifacts import Artifacts
from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.bound_session import Arrays, BoundSession
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.thread_pool import Piece, SleepingPool, cores
from onnxtrain.runtime.values import Values, ort_value

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
            tuple(_update(artifacts, spec) for spec in specs),
            ModelSpec("scalars", "", (), ()) if scalars is None else scalars,
            b"" if scalars is None else artifacts.source_of(scalars),
        )


def _update(artifacts: Artifacts, spec: ModelSpec) -> VectorUpdate:
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
        self._pieces: list[Piece] = []
        for group in updates.groups:
            session = runtime.create(group.source, threads=1)
            lines = {
                key: (gradients if key == group.gradient else values).line(names)
                for key, names in group.tensors.items()
            }
            length = len(lines[group.gradient])
            # Equal parts: a run costs the same for a rest of a few elements.
            parts = max(round(length / T.UPDATE_PIECE_ELEMENTS), 1)
            size = -(-max(length, 1) // parts // _ALIGNED) * _ALIGNED
            for start in range(0, length, size):
                part = {key: line[start : start + size] for key, line in lines.items()}
                self._pieces.append(self._bind(session, group, part))
        most = len(self._pieces) // T.UPDATE_PIECES_PER_THREAD
        self._crew = SleepingPool(min(cores() if threads is None else threads, most))

    @property
    def shared(self) -> bool:
        """Whether other threads work on the pieces too."""
        return self._crew.helpers > 0

    def _bind(self, session: Any, group: VectorUpdate, part: dict[str, np.ndarray]) -> Piece:
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
            for number, (start, count) in enumerate(_pieces(length), 1):
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
        call = BoundSession(
            session, group.spec, lines | scalars, outputs, self._device, graph_id
        )  # fmt: skip
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


def _pieces(length: int) -> list[tuple[int, int]]:
    """Return where each piece of a vector starts, and its length; all but the last are equal."""
    parts = max(-(-length // T.DEVICE_UPDATE_PIECE_ELEMENTS), 1)
    size = -(-max(length, 1) // parts // _ALIGNED) * _ALIGNED
    return [(start, min(size, length - start)) for start in range(0, length, size)]
