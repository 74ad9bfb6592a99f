"""Updates over long vectors: on the CPU piece by piece in the cache, on a device all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.artifacts.update.vector_graphs import GRADIENT, VectorGraph, VectorGraphs, results_of
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.device_call import DeviceSession
from onnxtrain.runtime.thread_pool import Piece, SleepingPool, cores
from onnxtrain.runtime.values import Values, ort_value

PIECE = 1 << 15
"""Elements that are updated at once on the CPU; what they need fits into the second-level cache."""

_ALIGNED = 16  # elements
_WORTH_A_THREAD = 8
"""Pieces from which waking another thread costs less than it saves."""

_KINDS = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
Arrays = Mapping[str, np.ndarray]


class Scalars:
    """What all updates of a step share, computed from learning rate, step and scale on the CPU."""

    def __init__(self, updates: VectorGraphs) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        """The results by name; :meth:`compute` writes them in place."""
        self._controls: dict[str, np.ndarray] = {}
        self._first = True
        self._session = runtime.create(updates.scalars.SerializeToString(), threads=1)
        self._binding = self._session.io_binding()
        for x in self._session.get_inputs():
            self._controls[x.name] = np.zeros(x.shape, _KINDS[x.type])
            self._binding.bind_ortvalue_input(x.name, ort_value(self._controls[x.name]))
        for y in self._session.get_outputs():
            plain = y.name.removesuffix(".out")
            name = plain if plain in self._controls else y.name
            self.arrays[name] = np.zeros(y.shape, _KINDS[y.type])
            self._binding.bind_ortvalue_output(y.name, ort_value(self.arrays[name]))

    def compute(self, feeds: Arrays) -> None:
        """Set :attr:`arrays` for one step."""
        changed = self._first
        for name, array in self._controls.items():
            new = feeds[name]
            if array != new:
                array[...], changed = new, True
        if changed and self.arrays:
            self._first = False
            runtime.run_bound(self._session, self._binding)


class VectorUpdater:
    """Runs flat updates over all pieces of the vectors, in memory of the CPU.

    Args:
        updates: the graphs.
        values: parameters and state, written in place.
        gradients: of the parameters.
        threads: that may share the pieces; ``None`` for one per core.
    """

    def __init__(
        self,
        updates: VectorGraphs,
        values: Values,
        gradients: Values,
        *,
        threads: int | None,
    ) -> None:
        self._scalars = Scalars(updates)
        self._pieces: list[Piece] = []
        for group in updates.groups:
            session = runtime.create(group.model.SerializeToString(), threads=1)
            lines = {
                key: (gradients if key == GRADIENT else values).line(
                    [m[key] for m in group.members]
                )
                for key in group.members[0]
            }
            length = len(lines[GRADIENT])
            # Equal parts: a run costs the same for a rest of a few elements.
            parts = max(round(length / PIECE), 1)
            size = -(-max(length, 1) // parts // _ALIGNED) * _ALIGNED
            for start in range(0, length, size):
                part = {key: line[start : start + size] for key, line in lines.items()}
                self._pieces.append((session, *self._bind(session, group, part)))
        most = len(self._pieces) // _WORTH_A_THREAD
        self._crew = SleepingPool(min(cores() if threads is None else threads, most))

    @property
    def shared(self) -> bool:
        """Whether other threads work on the pieces too."""
        return self._crew.helpers > 0

    def _bind(
        self, session: Any, group: VectorGraph, part: dict[str, np.ndarray]
    ) -> tuple[Any, list[tuple[np.ndarray, np.ndarray]]]:
        """Return a binding of one piece, and what to copy after it ran."""
        binding, copies = session.io_binding(), []
        for key, array in part.items():
            value = ort_value(array)
            binding.bind_ortvalue_input(key, value)
            if key == GRADIENT:
                continue
            if key not in group.in_place:
                copies.append((array, np.empty_like(array)))
                value = ort_value(copies[-1][1])
            binding.bind_ortvalue_output(f"{key}.out", value)
        for name in group.scalars:
            binding.bind_ortvalue_input(name, ort_value(self._scalars.arrays[name]))
        return binding, copies

    def run(self, feeds: Arrays) -> None:
        """Update everything; ``feeds`` are learning rate, step and scale."""
        if self._pieces:
            self._scalars.compute(feeds)
            self._crew.run(self._pieces)


class DeviceVectorUpdater:
    """Runs each flat update once over whole vectors, in memory of a device.

    Args:
        updates: the graphs.
        values: parameters and state, written in place.
        gradients: of the parameters.
        device: where they are.
        capture: record the runs and replay them. The recording itself may run an update more than
            once, and is made here: the caller sets the values after it.
    """

    shared = False
    """No thread of the CPU works on it."""

    def __init__(
        self,
        updates: VectorGraphs,
        values: Values,
        gradients: Values,
        device: str,
        *,
        capture: bool,
    ) -> None:
        self._scalars = Scalars(updates)
        self._calls: list[tuple[DeviceSession, tuple[str, ...], list[tuple[Any, Any]]]] = []
        for group in updates.groups:
            session = runtime.create(
                group.model.SerializeToString(), device=device, threads=1, capture=capture
            )
            inputs, outputs, copies = {}, {}, []
            for key in group.members[0]:
                source = gradients if key == GRADIENT else values
                inputs[key] = line = source.line_value([m[key] for m in group.members])
                if key == GRADIENT:
                    continue
                if key not in group.in_place:
                    spare = ort_value(line.numpy(), device)
                    copies.append((line, spare))
                    line = spare
                outputs[f"{key}.out"] = line
            call = DeviceSession(
                session, results_of(group.model), inputs, outputs, device, 1 if capture else None
            )
            self._calls.append((call, group.scalars, copies))
        if capture:
            self._run()

    def run(self, feeds: Arrays) -> None:
        """Update everything; ``feeds`` are learning rate, step and scale."""
        self._scalars.compute(feeds)
        self._run()

    def _run(self) -> None:
        for call, scalars, copies in self._calls:
            call.run({n: self._scalars.arrays[n] for n in scalars})
            for target, source in copies:
                target.update_inplace(source)
