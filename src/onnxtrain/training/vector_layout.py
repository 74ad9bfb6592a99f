"""Training on one long vector: plain gradients, then the update in place, a piece at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.update.fuse_sgd import FusedSgd, fuse_sgd
from onnxtrain.artifacts.update.vector_graphs import (
    GRADIENT,
    VectorGraphs,
    vector_graphs,
    without_accumulation,
)
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.cuda_graph import can_capture
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.values import Values
from onnxtrain.training.layouts import Separate, bound_call, model_of
from onnxtrain.training.vector_update import DeviceVectorUpdater, VectorUpdater

Arrays = Mapping[str, np.ndarray]


class VectorLayout(Separate):
    """Gradients of one batch and an update over vectors; :func:`vector_layout` says when."""

    def __init__(  # Separate's own is for another set of graphs
        self,
        artifacts: Artifacts,
        train: Any,
        updates: VectorGraphs,
        *,
        device: str,
        threads: int | None,
        capture: bool,
        release: bool = False,
        fold: FusedSgd | None = None,
    ) -> None:
        self.spec, self.update = _roles(artifacts)
        self._results = {} if fold is None else fold.results
        if fold is not None:
            train, updates = fold.train, fold.updates
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
        accumulators = [t.name for t in self.spec.inputs_of("accumulator")]
        self._gradient_names = [t.name for t in self.update.inputs_of("gradient")]
        known = {t.name: t for t in self.update.inputs}
        lines = [m[GRADIENT] for g in updates.groups for m in g.members]
        self._gradient = Values({n: _zeros(known[n]) for n in lines}, device)
        # Values that a step gives whole have two homes in turn; all others are changed in place.
        self._homes = (self._values, Values({n: _zeros(known[n]) for n in self._results}, device))
        self._now = 0
        places = dict(zip(accumulators, self._gradient_names, strict=True))
        inputs = {t.name: self._values[t.name] for t in self.spec.inputs if t.name in self._values}
        gradients = {t.name: places[t.feeds or ""] for t in self.spec.outputs_of("gradient")}
        outputs = {t: self._gradient[n] for t, n in gradients.items() if n in self._gradient}
        outputs |= {t.name: self._fresh[t.feeds or ""] for t in self.spec.outputs_of("buffer")}
        source = train.SerializeToString()
        self.sources = (source, *(g.model.SerializeToString() for g in updates.groups))
        self._descent: VectorUpdater | DeviceVectorUpdater
        if device == "cpu":
            self._descent = VectorUpdater(updates, self._values, self._gradient, threads=threads)
        else:
            self._descent = DeviceVectorUpdater(
                updates, self._values, self._gradient, device, capture=capture
            )
            for n in order:
                self._values.write(n, start[n])
        rest = self._descent.shared
        session = runtime.create(source, device=device, threads=threads, capture=capture, rest=rest)
        self.asks = self._bound_spec(fold, set(outputs))
        graph_id = 1 if capture else None
        self._calls = [
            bound_call(
                session,
                self.asks,
                {**inputs, **{n: old[n] for n in self._results}},
                {**outputs, **{y: new[n] for n, y in self._results.items()}},
                device,
                graph_id,
            )
            for old, new in (self._homes, self._homes[::-1])[: 2 if self._results else 1]
        ]
        self.in_place = set(order)

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
        self._descent.run(feeds)

    def describe_updates(self, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
        """Return what the last computation found for each parameter, with words for it."""
        new = self._homes[1 - self._now]
        return [
            (f"new value of {n!r}", new.view(n))
            if n in self._results
            else (f"gradient of {n!r}", self._gradient.view(g))
            for n, g in zip(names, self._gradient_names, strict=True)
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

    def _bound_spec(self, fold: FusedSgd | None, bound: set[str]) -> ModelSpec:
        """Return what the gradient graph takes and gives as it is run here."""
        spec = self.spec
        inputs = tuple(t for t in spec.inputs if t.role not in ("accumulator", "reset"))
        if fold is None:
            return dataclasses.replace(spec, role="gradients", inputs=inputs)
        outputs = [t for t in spec.outputs if t.role != "gradient" or t.name in bound]
        outputs += [TensorSpec(y, "", (), "gradient") for y in self._results.values()]
        return dataclasses.replace(
            spec, role="gradients", inputs=(*inputs, *fold.controls), outputs=tuple(outputs)
        )


def vector_layout(
    artifacts: Artifacts,
    *,
    device: str = "cpu",
    threads: int | None,
    capture: bool | None = False,
    release: bool = False,
) -> VectorLayout | None:
    """Return the layout if batches are not accumulated and the optimizer treats elements alike.

    Args:
        artifacts: the models and the values to start with.
        device: where they run.
        threads: of the gradient graph's pool, and of the update.
        capture: see :class:`onnxtrain.training.trainer.Trainer`.
        release: on the CPU, let go of the artifacts' values while they are copied: all of them
            are never there twice.
    """
    if artifacts.manifest.accumulate > 1 or artifacts.manifest.options.get("loss_scale"):
        return None
    spec, update = _roles(artifacts)
    if spec is None or update is None:
        return None
    updates = vector_graphs(
        model_of(artifacts.source("optimizer")), update, artifacts.manifest.state
    )
    source = artifacts.source("train")
    whole = onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)
    train = without_accumulation(whole, spec)
    if updates is None or train is None:
        return None
    recorded = can_capture(train, spec, capture, device=device)
    del whole
    return VectorLayout(
        artifacts, train, updates,
        device=device, threads=threads, capture=recorded, release=release,
        fold=_folded(train, updates, spec, update) if device == "cpu" else None,
    )  # fmt: skip


def _roles(artifacts: Artifacts) -> tuple[Any, Any]:
    return artifacts.manifest.model("train"), artifacts.manifest.model("optimizer")


def _folded(
    train: onnx.ModelProto, updates: VectorGraphs, spec: ModelSpec, update: ModelSpec
) -> FusedSgd | None:
    accumulators = [t.name for t in spec.inputs_of("accumulator")]
    outputs = {t.feeds: t.name for t in spec.outputs_of("gradient")}
    names = [t.name for t in update.inputs_of("gradient")]
    return fuse_sgd(
        train, updates, {n: outputs[a] for n, a in zip(names, accumulators, strict=True)}
    )


def _zeros(like: TensorSpec) -> np.ndarray:
    """Return zeros that take no memory of their own."""
    return np.broadcast_to(np.zeros((), numpy_dtype(like.dtype)), [int(d) for d in like.shape])
