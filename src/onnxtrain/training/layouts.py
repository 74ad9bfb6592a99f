"""Two ways to run a step, which give the same numbers.

``Fused`` runs one graph from old values to new ones and swaps two sets of buffers. ``Separate``
runs gradients and update as two graphs; the update may write in place, which saves a copy of all.
Both compute first and change nothing until ``commit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from onnxtrain import thresholds as T
from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import CheckpointError
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.bound_session import Arrays, BoundSession
from onnxtrain.runtime.cuda_graph import can_capture, create_capturing
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.values import Values


class Layout(Protocol):
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


class Fused:
    """One graph per step, two sets of buffers in turn; they are never the same memory."""

    def __init__(
        self,
        artifacts: Artifacts,
        *,
        device: str,
        threads: int | None,
        capture: bool | None = False,
    ) -> None:
        self.spec = spec_of(artifacts, "step")
        source = artifacts.source("step")
        session, recorded = open_session(
            source, self.spec, device=device, threads=threads, capture=capture
        )
        self.sources = (source,)
        reopen = None if capture else reopening(source, device=device, threads=threads)
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


class Separate:
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
        self.spec, self.update = spec_of(artifacts, "train"), spec_of(artifacts, "optimizer")
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
    asked = capture is not False and (capture or device == "cuda")
    if asked and can_capture(model_of(source), spec, capture, device=device):
        return create_capturing(source, asked=capture, device=device, threads=threads, rest=rest)
    return runtime.create(source, device=device, threads=threads, rest=rest), False


def reopening(source: bytes | str, *, device: str, threads: int | None) -> Callable[[], Any]:
    """Return what makes a session that does not record, once however often it is asked."""
    return functools.cache(lambda: runtime.create(source, device=device, threads=threads))


def spec_of(artifacts: Artifacts, role: str) -> ModelSpec:
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


def model_of(source: bytes | str) -> onnx.ModelProto:
    """Return the graph of a model, without weights that lie in other files."""
    if isinstance(source, str):
        return onnx.load(source, load_external_data=False)
    return onnx.load_from_string(source)
