"""Training on one long vector: plain gradients, then the update in place, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.manifest import WeightSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.bound_session import Arrays, BoundSession
from onnxtrain.runtime.cuda_graph import can_capture
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.values import Values
from onnxtrain.training.layouts import open_session, reopening, spec_of
from onnxtrain.training.vector_update import DeviceVectorUpdater, VectorUpdater, VectorUpdates


class VectorLayout:
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
        self.spec = spec_of(artifacts, "gradients")
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
        self._reopen = None if capture else reopening(source, device=device, threads=threads)
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


def vector_layout(
    artifacts: Artifacts,
    *,
    device: str = "cpu",
    threads: int | None,
    capture: bool | None = False,
    release: bool = False,
) -> VectorLayout | None:
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
    return VectorLayout(artifacts, device=device, threads=threads, capture=capture, release=release)


def _zeros(like: WeightSpec) -> np.ndarray:
    """Return zeros that take no memory of their own."""
    return np.broadcast_to(np.zeros((), numpy_dtype(like.dtype)), like.shape)
