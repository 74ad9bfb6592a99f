"""Training on one long vector: plain gradients, then the update in place, a piece at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.call import Call
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.flat_graphs import (
    GRADIENT,
    FlatUpdate,
    FlatUpdates,
    flat_updates,
    without_accumulation,
)
from onnxtrain.runtime.layouts import Separate, model_of
from onnxtrain.runtime.values import Values, ort_value

PIECE = 1 << 15
"""Elements that are updated at once; what they need fits into the second-level cache."""

Arrays = Mapping[str, np.ndarray]


class Flat(Separate):
    """Gradients of one batch and an update over vectors; see :func:`flat_of` for when it can be."""

    def __init__(  # Separate's own is for another set of graphs
        self, artifacts: Artifacts, train: Any, updates: FlatUpdates, *, threads: int | None
    ) -> None:
        self.spec, self.update = _roles(artifacts)
        self._device = "cpu"
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
        self._values = Values({n: start[n] for n in order}, "cpu")
        names = {t.name for t in self.update.inputs_of("gradient")}
        accumulators = [t.name for t in self.spec.inputs_of("accumulator")]
        self._gradient_names = [t.name for t in self.update.inputs_of("gradient")]
        known = {t.name: t for t in self.update.inputs}
        lines = [m[GRADIENT] for g in updates.groups for m in g.members]
        assert names == set(lines)
        zeros = {
            n: np.zeros([int(d) for d in known[n].shape], numpy_dtype(known[n].dtype))
            for n in lines
        }
        self._gradient = Values(zeros, "cpu")
        self._buffers = [t.feeds or "" for t in self.spec.outputs_of("buffer")]
        self._fresh = Values({n: start[n] for n in self._buffers}, "cpu")
        places = dict(zip(accumulators, self._gradient_names, strict=True))
        inputs = {t.name: self._values[t.name] for t in self.spec.inputs if t.name in self._values}
        outputs = {
            t.name: self._gradient[places[t.feeds or ""]] for t in self.spec.outputs_of("gradient")
        }
        outputs |= {t.name: self._fresh[t.feeds or ""] for t in self.spec.outputs_of("buffer")}
        session = runtime.create(train.SerializeToString(), threads=threads)
        self._call = Call(session, _without(self.spec, "accumulator", "reset"), inputs, outputs)
        self._descent = Descent(updates, self._values, self._gradient)
        self.in_place = {n for n in order if n in start}

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


class Descent:
    """Runs flat updates over all pieces of the vectors."""

    def __init__(self, updates: FlatUpdates, values: Values, gradients: Values) -> None:
        self._controls: dict[str, np.ndarray] = {}
        self._scalars: dict[str, np.ndarray] = {}
        self._shared = self._bind_scalars(updates)
        self._pieces: list[tuple[Any, Any, list[tuple[np.ndarray, np.ndarray]]]] = []
        for group in updates.groups:
            session = runtime.create(group.model.SerializeToString(), threads=1)
            lines = {
                key: (gradients if key == GRADIENT else values).line(
                    [m[key] for m in group.members]
                )
                for key in group.members[0]
            }
            for start in range(0, len(lines[GRADIENT]), PIECE):
                part = {key: line[start : start + PIECE] for key, line in lines.items()}
                self._pieces.append((session, *self._bind(session, group, part)))

    def _bind_scalars(self, updates: FlatUpdates) -> tuple[Any, Any]:
        session = runtime.create(updates.scalars.SerializeToString(), threads=1)
        binding = session.io_binding()
        kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
        kinds |= {"tensor(double)": np.float64, "tensor(float16)": np.float16}
        kinds |= {"tensor(bool)": np.bool_}
        for x in session.get_inputs():
            self._controls[x.name] = np.zeros(x.shape, kinds[x.type])
            binding.bind_ortvalue_input(x.name, ort_value(self._controls[x.name]))
        for y in session.get_outputs():
            name = (
                y.name.removesuffix(".out")
                if y.name.removesuffix(".out") in self._controls
                else y.name
            )
            self._scalars[name] = np.zeros(y.shape, kinds[y.type])
            binding.bind_ortvalue_output(y.name, ort_value(self._scalars[name]))
        return session, binding

    def _bind(
        self, session: Any, group: FlatUpdate, part: dict[str, np.ndarray]
    ) -> tuple[Any, list[tuple[np.ndarray, np.ndarray]]]:
        """Give a binding of one piece, and what to copy after it ran."""
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
            binding.bind_ortvalue_input(name, ort_value(self._scalars[name]))
        return binding, copies

    def run(self, feeds: Arrays) -> None:
        """Update everything; ``feeds`` are learning rate, step and scale."""
        for name, array in self._controls.items():
            array[...] = feeds[name]
        if self._scalars:
            runtime.run_bound(*self._shared)
        for session, binding, copies in self._pieces:
            runtime.run_bound(session, binding)
            for target, source in copies:
                target[...] = source


def flat_of(artifacts: Artifacts, *, threads: int | None) -> Flat | None:
    """Give the layout if batches are not accumulated and the optimizer treats elements alike."""
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
    return Flat(artifacts, train, updates, threads=threads)


def _roles(artifacts: Artifacts) -> tuple[Any, Any]:
    return artifacts.manifest.model("train"), artifacts.manifest.model("optimizer")


def _without(spec: Any, *roles: str) -> Any:
    return dataclasses.replace(spec, inputs=tuple(t for t in spec.inputs if t.role not in roles))
