"""Training on one long vector: plain gradients, then the update in place, a piece at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.capture import decide
from onnxtrain.runtime.descent import Descent, DeviceDescent
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.flat_graphs import (
    GRADIENT,
    FlatUpdates,
    flat_updates,
    without_accumulation,
)
from onnxtrain.runtime.layouts import Separate, bound_call, model_of
from onnxtrain.runtime.values import Values

Arrays = Mapping[str, np.ndarray]


class Flat(Separate):
    """Gradients of one batch and an update over vectors; see :func:`flat_of` for when it can be."""

    def __init__(  # Separate's own is for another set of graphs
        self,
        artifacts: Artifacts,
        train: Any,
        updates: FlatUpdates,
        *,
        device: str,
        threads: int | None,
        capture: bool,
        release: bool = False,
    ) -> None:
        self.spec, self.update = _roles(artifacts)
        self._device, self.captured = device, capture
        start = {**artifacts.values, **artifacts.state}
        own = {t.name for t in (*self.spec.inputs, *self.update.inputs)}
        order = [
            m[key]
            for g in updates.groups
            for key in g.members[0]
            if key != GRADIENT
            for m in g.members
        ]
        order += [n for n in start if n in own and n not in set(order)]
        self._buffers = [t.feeds or "" for t in self.spec.outputs_of("buffer")]
        self._fresh = Values({n: start[n] for n in self._buffers}, device)
        taken = {n: start[n] for n in order}
        release = release and device == "cpu"
        if release:
            start.clear()
            artifacts.forget()
        self._values = Values(taken, device, release=release)
        names = {t.name for t in self.update.inputs_of("gradient")}
        accumulators = [t.name for t in self.spec.inputs_of("accumulator")]
        self._gradient_names = [t.name for t in self.update.inputs_of("gradient")]
        known = {t.name: t for t in self.update.inputs}
        lines = [m[GRADIENT] for g in updates.groups for m in g.members]
        assert names == set(lines)
        zeros = {
            n: np.broadcast_to(
                np.zeros((), numpy_dtype(known[n].dtype)), [int(d) for d in known[n].shape]
            )
            for n in lines
        }
        self._gradient = Values(zeros, device)
        places = dict(zip(accumulators, self._gradient_names, strict=True))
        inputs = {t.name: self._values[t.name] for t in self.spec.inputs if t.name in self._values}
        outputs = {
            t.name: self._gradient[places[t.feeds or ""]] for t in self.spec.outputs_of("gradient")
        }
        outputs |= {t.name: self._fresh[t.feeds or ""] for t in self.spec.outputs_of("buffer")}
        source = train.SerializeToString()
        self.sources = (source, *(g.model.SerializeToString() for g in updates.groups))
        session = runtime.create(source, device=device, threads=threads, capture=capture)
        spec = _without(self.spec, "accumulator", "reset")
        graph_id = 1 if capture else None
        self._call = bound_call(session, spec, inputs, outputs, device, graph_id)
        self._descent: Descent | DeviceDescent
        if device == "cpu":
            self._descent = Descent(updates, self._values, self._gradient, threads=threads)
        else:
            self._descent = DeviceDescent(
                updates, self._values, self._gradient, device, capture=capture
            )
            for n in order:
                self._values.write(n, start[n])
        self.in_place = set(order)

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run the gradient graph on one batch; give loss, metrics and outputs."""
        return self._call.run({n: a for n, a in feeds.items() if n != "lazy_reset_grad"})

    def commit(self) -> None:
        """Take over the new buffers."""
        self._values.copy_from(self._fresh, self._buffers)

    def descend(self, feeds: Arrays) -> None:
        """Update all parameters with the gradients."""
        self._descent.run(feeds)

    def gradients(self, *, computed: bool = False) -> list[np.ndarray]:
        """Give the gradients in the order of the parameters."""
        return [self._gradient.view(n) for n in self._gradient_names]


def flat_of(
    artifacts: Artifacts,
    *,
    device: str = "cpu",
    threads: int | None,
    capture: bool | None = False,
    release: bool = False,
) -> Flat | None:
    """Give the layout if batches are not accumulated and the optimizer treats elements alike.

    Args:
        artifacts: the models and the values to start with.
        device: where they run.
        threads: of the gradient graph's pool, and of the update.
        capture: see :class:`onnxtrain.runtime.trainer.Trainer`.
        release: on the CPU, let go of the artifacts' values while they are copied: all of them
            are never there twice.
    """
    if artifacts.manifest.accumulate > 1 or artifacts.manifest.options.get("loss_scale"):
        return None
    spec, update = _roles(artifacts)
    if spec is None or update is None:
        return None
    updates = flat_updates(
        model_of(artifacts.source("optimizer")), update, artifacts.manifest.state
    )
    source = artifacts.source("train")
    whole = onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)
    train = without_accumulation(whole, spec)
    if updates is None or train is None:
        return None
    recorded = decide(train, spec, capture, device=device)
    del whole
    return Flat(
        artifacts, train, updates,
        device=device, threads=threads, capture=recorded, release=release,
    )  # fmt: skip


def _roles(artifacts: Artifacts) -> tuple[Any, Any]:
    return artifacts.manifest.model("train"), artifacts.manifest.model("optimizer")


def _without(spec: Any, *roles: str) -> Any:
    return dataclasses.replace(spec, inputs=tuple(t for t in spec.inputs if t.role not in roles))
