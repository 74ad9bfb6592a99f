"""Training on stock ONNX Runtime.

What a shell and a notebook show of a trainer.

One trainer serves one thread at a time, and there is one of it.

Artifacts that were built for another device than the one they run on.

Batches that are too small for the statistics of BatchNormalization.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.directory import Row, SummaryRepr, split_tensors
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.errors import BusyError, CheckpointError, OnnxTrainError, ShapeError, UncopiableError
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.binding import can_capture
from onnxtrain.runtime.feeds import Feeder, feed, numpy_dtype, to_array
from onnxtrain.runtime.ort_values import CONTROL, ort_value
from onnxtrain.targets import TARGETS
from onnxtrain.training.checks import (
    SEED_LIMIT,
    LoadedCheckpoint,
    Progress,
    check_lr,
    check_origin,
    graph_digests,
)
from onnxtrain.training.data import explain_label_error
from onnxtrain.training.engine import (
    FusedEngine,
    SeparateEngine,
    VectorEngine,
    control_values,
    create_vector_engine,
    pick_layout,
)
from onnxtrain.training.fit import fit
from onnxtrain.training.inference import Predictor, export, match_weights
from onnxtrain.training.metrics import evaluate_on
from onnxtrain.training.results import Outputs, Parameters, StepResult


class TrainerSummary(SummaryRepr):
    """The part of a trainer that tells how it stands."""

    manifest: Any
    batch_specs: Any
    device: str
    layout: str
    global_step: int
    lr: Any
    seed: int

    def summary(self) -> tuple[str, list[Row]]:
        """Return what a shell shows: what a batch is, and how far training has come."""
        batch = ", ".join(
            f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]" for t in self.batch_specs
        )
        rows = [
            ("batch", batch),
            ("step", str(self.global_step)),
            ("lr", f"{self.lr:g}"),
            ("loss", str(self.manifest.loss.get("name", ""))),
            ("optimizer", str(self.manifest.optimizer.get("name", ""))),
            ("runs on", f"{self.device}, layout {self.layout}, seed {self.seed}"),
        ]
        return "Trainer", rows


class Uncopyable:
    """Refuses to be pickled and copied: sessions and buffers cannot be."""

    def __reduce__(self) -> NoReturn:
        raise UncopiableError(
            "a trainer cannot be pickled or copied\n"
            "hint: pickle its artifacts, or save() here and load() in a trainer over there"
        )


class ThreadGuard:
    """A region that one thread may be in, also several times over; others are refused."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread uses this trainer\n"
                "hint: a trainer of its own for each thread; they may share the artifacts"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class _Guarded(Protocol):
    in_use: ThreadGuard


S = TypeVar("S", bound=_Guarded)
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return a method that refuses to run while another thread runs one of the same object."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **named: P.kwargs) -> R:
        with self.in_use:
            return method(self, *args, **named)

    return call


def warn_target_mismatch(spec: ModelSpec, device: str) -> None:
    """Warn if a GPU runs a model that was built for something else.

    It gives the same numbers, but nodes may run on the CPU, or in forms that are slow on a GPU.
    """
    here = TARGETS.get(device)
    if here is None or not here.gpu or spec.is_for(device):
        return
    warnings.warn(
        f"these artifacts were built for target {spec.target!r} and run on {device!r}: "
        f'build(..., target="{device}") is faster there',
        stacklevel=3,
    )


def check_batch_size(
    products: Any, specs: Sequence[TensorSpec], feeds: Mapping[str, np.ndarray]
) -> None:
    """Refuse a batch that leaves BatchNormalization one value per channel.

    Args:
        products: of sizes that have to be above 1, as the manifest's options list them.
        specs: of the batch.
        feeds: the batch.

    Raises:
        ShapeError: naming the size.
    """
    if not products:
        return
    pairs = [(s, feeds[s.name]) for s in specs if s.name in feeds]
    sizes = {d: n for s, a in pairs for d, n in zip(s.shape, a.shape, strict=True)}
    for product in products:
        names = str(product).split("*")
        if all(n in sizes for n in names) and math.prod(sizes[n] for n in names) == 1:
            raise ShapeError(
                f"{' and '.join(names)} of 1 leave BatchNormalization one value per channel; in "
                "training it needs more\n"
                "hint: another batch_size, drop_last=True if it is the last batch of an epoch, or "
                "build(mode='as-is')"
            )


class Trainer(TrainerSummary, Uncopyable):
    """Runs training steps of artifacts on onnxruntime, for one thread at a time.

    Args:
        artifacts: what :func:`onnxtrain.build` gave, or a directory.
        device: ``"cpu"`` or ``"cuda"``.
        layout: ``"fused"``, ``"separate"`` or ``"auto"``, which picks the faster one; both give
            the same numbers, with plain SGD up to rounding.
        seed: of dropout masks and of the order of the data.
        threads: of onnxruntime's pool; ``None`` takes all cores.
        capture: on CUDA, record a step as a CUDA graph and replay it; ``None`` does so where the
            artifacts allow it: every size fixed by ``build(dims=...)``, no control flow.
    """

    def __init__(
        self,
        artifacts: Artifacts | str | os.PathLike[str],
        *,
        device: str = "cpu",
        layout: str = "auto",
        seed: int = 0,
        threads: int | None = None,
        capture: bool | None = None,
    ) -> None:
        loaded = not isinstance(artifacts, Artifacts)
        if not isinstance(artifacts, Artifacts):
            artifacts = Artifacts.load(artifacts)
        runtime.check_device(device)
        if layout not in ("auto", "fused", "separate"):
            raise OnnxTrainError(f"no such layout: {layout!r}\nhint: auto, fused or separate")
        if not 0 <= seed < SEED_LIMIT:
            raise OnnxTrainError(f"seed must lie in [0, 2**24): {seed}")
        self.in_use = ThreadGuard()
        self.artifacts, self.manifest = artifacts, artifacts.manifest
        self.device, self.threads, self.seed = device, threads, seed
        self.lr = self.manifest.optimizer.get("lr")
        self.global_step = 0
        self.properties: dict[str, int | float | str] = {}
        self._micro = 0
        self._control_specs: dict[str, list[TensorSpec]] = {}
        if artifacts.meta:
            self._set_progress(self._progress.read(artifacts.meta, self.manifest.checkpoint))
            self.seed = seed or self.seed
        flat = None
        # On a device an update without state is not worth a second call.
        if layout != "fused" and (device == "cpu" or artifacts.state):
            flat = create_vector_engine(
                artifacts, device=device, threads=threads, capture=capture, release=loaded
            )
        if layout == "auto":
            layout = "separate" if flat else pick_layout(artifacts, device)
        if layout == "fused" and self.manifest.accumulate > 1:
            raise OnnxTrainError("accumulated gradients need layout='separate'")
        self.layout = layout
        self._engine: FusedEngine | SeparateEngine | VectorEngine
        if layout == "fused":
            self._engine = FusedEngine(artifacts, device=device, threads=threads, capture=capture)
        else:
            self._engine = flat or SeparateEngine(artifacts, device=device, threads=threads)
            if capture and flat is None:
                can_capture(None, None, capture, device=device)
        warn_target_mismatch(self._engine.spec, device)
        if loaded and device == "cpu":  # nobody else has them: one copy of all values is enough
            self.artifacts = artifacts.over(self._engine.view)
        self.batch_specs = self._engine.spec.inputs_of("input", "target")
        self._feed = Feeder(self.batch_specs)
        self._outputs = Outputs(self._engine.spec)
        self.loss_name, self.metric_names = self._outputs.loss, self._outputs.metrics
        self._evaluator: Any = None
        self._graphs: dict[str, str] | None = None
        self._predictor: Predictor | None = None
        self._differentiator: SeparateEngine | None = None

    @property
    def lr(self) -> float:
        """The learning rate: an input of the step, so setting it costs nothing."""
        return self._lr

    @lr.setter
    def lr(self, value: Any) -> None:
        self._lr = check_lr(value, "lr")

    @property
    def captured(self) -> bool:
        """Whether steps are recorded as a CUDA graph and replayed."""
        return self._engine.captured

    @property
    def step_models(self) -> tuple[bytes | str, ...]:
        """The models that a step runs, as :func:`onnxtrain.runtime.session.placement` takes."""
        return self._engine.sources

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs and targets of a batch, in the order of positional arguments."""
        return [t.name for t in self.batch_specs]

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that the model is fixed to, if it is."""
        sizes = [t.shape[0] for t in self.batch_specs[:1] if t.shape]
        return next((d for d in sizes if isinstance(d, int)), None)

    @property
    def accumulating(self) -> bool:
        """Whether gradients are waiting for an update."""
        return self._micro > 0

    @exclusive
    def step(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one batch, given by position or by name.

        Raises:
            ShapeError: if the batch or a label does not fit; nothing has changed then.
        """
        return self.commit(self.compute(self._feed(batch, named)))

    @exclusive
    def compute(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a step on arrays that fit, but change nothing yet."""
        check_batch_size(self.manifest.options.get("above_one"), self.batch_specs, feeds)
        control = self._control(self._engine.spec, self.global_step + 1, micro=self._micro)
        try:
            return self._engine.compute({**feeds, **control})
        except OnnxTrainError as error:
            raise explain_label_error(self, error, feeds) from error

    @exclusive
    def commit(self, outputs: Mapping[str, np.ndarray]) -> StepResult:
        """Take over what the last :meth:`compute` found, and update when enough is accumulated."""
        number = self.global_step + 1
        self._engine.commit()
        if isinstance(self._engine, FusedEngine):
            self.global_step = number
            return self._outputs.result(outputs, number, updated=True)
        self._micro += 1
        updated = self._micro >= self.manifest.accumulate
        if updated:
            self.flush()
        return self._outputs.result(outputs, number, updated=updated)

    @exclusive
    def flush(self) -> bool:
        """Update with the gradients accumulated so far; ``False`` if there are none."""
        if not self._micro:
            return False
        assert not isinstance(self._engine, FusedEngine)
        number = self.global_step + 1
        scale = 1.0 / self._micro
        self._engine.update_parameters(self._control(self._engine.update, number, scale=scale))
        self.global_step, self._micro = number, 0
        return True

    def _control(
        self, spec: ModelSpec, number: int, *, micro: int = 0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        # Every batch has a draw of its own, counted so that float32 holds it exactly.
        draw = ((number - 1) * self.manifest.accumulate + micro + 1) % SEED_LIMIT
        numbers = {"lr": self._lr, "step": number, "rng": (self.seed, draw)}
        numbers |= {"grad_scale": scale, "reset": micro == 0}
        return control_values(self._controls(spec), numbers)

    def _controls(self, spec: ModelSpec) -> list[TensorSpec]:
        """Return the inputs that the trainer sets by itself; looked up once per model."""
        if spec.role not in self._control_specs:
            self._control_specs[spec.role] = spec.inputs_of(*CONTROL)
        return self._control_specs[spec.role]

    @exclusive
    def gradients(self, *batch: Any, **named: Any) -> dict[str, np.ndarray]:
        """Return the gradients of one batch by parameter name; nothing is updated."""
        if self._differentiator is None:
            self._differentiator = SeparateEngine(
                self.artifacts, device=self.device, threads=self.threads
            )
        engine = self._differentiator
        scaler = [t.name for t in engine.spec.inputs_of("state")]
        for name in (*self._weight_names(), *scaler):
            engine.write(name, self._engine.view(name))
        feeds = feed(self.batch_specs, batch, named)
        check_batch_size(self.manifest.options.get("above_one"), self.batch_specs, feeds)
        engine.compute({**feeds, **self._control(engine.spec, self.global_step + 1)})
        names = [p.name for p in self.manifest.parameters]
        gradients = engine.gradients(computed=True)
        scale = self._engine.view(*scaler) if scaler else 1
        return {n: np.asarray(g / scale, g.dtype) for n, g in zip(names, gradients, strict=True)}

    @exclusive
    def evaluate_batch(self, *batch: Any, **named: Any) -> StepResult:
        """Return loss, metrics and outputs of one batch in evaluation mode."""
        spec = self.manifest.model("eval")
        if spec is None:
            raise CheckpointError("these artifacts have no eval model\nhint: build them again")
        if self._evaluator is None:
            self._evaluator = runtime.create(
                self.artifacts.source("eval"), device=self.device, threads=self.threads
            )
        feeds = feed(spec.inputs_of("input", "target"), batch, named)
        feeds.update(self._control(spec, 0))
        outputs = Outputs(spec)
        own = [t.name for t in spec.inputs_of("parameter", "buffer")]
        if self.device == "cpu":
            feeds.update({n: self._engine.view(n) for n in own})
            try:
                arrays = runtime.run(self._evaluator, outputs.names, feeds)
            except OnnxTrainError as error:
                raise explain_label_error(self, error, feeds) from error
        else:  # weights stay where they are
            values = {n: ort_value(a, self.device) for n, a in feeds.items()}
            values.update({n: self._engine.value(n) for n in own})
            results = runtime.run_values(self._evaluator, outputs.names, values)
            arrays = [np.array(r.numpy()) for r in results]
        arrays = dict(zip(outputs.names, arrays, strict=True))
        return outputs.result(arrays, self.global_step, updated=False)

    evaluate = evaluate_on
    fit = fit

    @exclusive
    def predict(self, *positional: Any, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the outputs of the inference model with the current weights."""
        if self._predictor is None:
            self._predictor = Predictor(self.artifacts, device=self.device, threads=self.threads)
        feeds = feed(self._predictor.spec.inputs, positional, inputs)
        return self._predictor.run(feeds, self._engine.view)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name: read with ``[...]``, set with ``[...] = array``."""
        specs = {p.name: p for p in self.manifest.parameters}
        return Parameters(specs, self._engine.view, self._engine.write)

    @property
    def buffers(self) -> Parameters:
        """Running statistics by name, read and set like :attr:`parameters`."""
        specs = {b.name: b for b in self.manifest.buffers}
        return Parameters(specs, self._engine.view, self._engine.write)

    def view(self, name: str) -> np.ndarray:
        """Return a parameter, buffer or state tensor without a copy; valid until the next step."""
        return self._engine.view(name)

    def pending_updates(self) -> list[tuple[str, np.ndarray]]:
        """Return what :meth:`compute` found for each parameter: its new value, or its gradient."""
        return self._engine.describe_updates([p.name for p in self.manifest.parameters])

    def debug_feeds(
        self, feeds: Mapping[str, np.ndarray]
    ) -> tuple[bytes | str, dict[str, np.ndarray]]:
        """Return the model of a step and all that it reads for a batch, to run it again."""
        spec = self._engine.spec
        values = {**feeds, **self._control(spec, self.global_step + 1, micro=self._micro)}
        for t in spec.inputs:
            if t.name in values:
                continue
            if t.role == "accumulator":
                sizes = tuple(d for d in t.shape if isinstance(d, int))
                values[t.name] = np.zeros(sizes, numpy_dtype(t.dtype))
            else:
                values[t.name] = self._engine.view(t.name)
        return self.artifacts.source(spec.role), values

    def _weight_names(self) -> list[str]:
        return [w.name for w in (*self.manifest.parameters, *self.manifest.buffers)]

    @exclusive
    def state_dict(self) -> dict[str, np.ndarray]:
        """Return everything that a checkpoint holds, by the names it has there."""
        state = {n: np.array(self._engine.view(n)) for n in self._weight_names()}
        for s in self.manifest.state:
            state[state_key(s.parameter, s.slot)] = np.array(self._engine.view(s.name))
        return state

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Set everything from what :meth:`state_dict` gave; nothing changes if something is off."""
        self._set_all(self._arrays({n: to_array(v) for n, v in tensors.items()}, "the state"))

    def _arrays(self, tensors: Mapping[str, np.ndarray], label: str) -> dict[str, np.ndarray]:
        values, state = split_tensors(self.manifest, tensors, label)
        return {**values, **state}

    @exclusive
    def _set_all(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._engine.write(name, array)
        self._micro = 0

    @exclusive
    def load_weights(
        self, weights: Mapping[str, Any] | str | os.PathLike[str], *, strict: bool = True
    ) -> list[str]:
        """Set parameters and buffers from a state_dict or a safetensors file; return the names set.

        Args:
            weights: names to arrays or tensors, or a path.
            strict: refuse names that the model has not, and missing ones.
        """
        if isinstance(weights, str | os.PathLike):
            weights = load_checkpoint(weights)[0]
        arrays = match_weights(weights, self.manifest, strict=strict)
        for name, array in arrays.items():
            self._engine.write(name, array.astype(self._engine.view(name).dtype))
        return list(arrays)

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint records besides tensors."""
        if self._graphs is None:
            self._graphs = graph_digests(self.artifacts)
        return {
            "graphs": self._graphs,
            "lr": self.lr,
            "manifest": self.manifest.to_dict(hashes=False),
            "properties": self.properties,
            "seed": self.seed,
            "step": self.global_step,
        }

    @property
    def _progress(self) -> Progress:
        return Progress(self.lr, self.global_step, self.seed, self.properties)

    def _set_progress(self, progress: Progress) -> None:
        self.lr, self.global_step, self.seed, self.properties = dataclasses.astuple(progress)

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint: whole, or the old file stays."""
        if self._micro:
            raise OnnxTrainError(
                "gradients are accumulated but not applied\nhint: call flush() before save()"
            )
        save_checkpoint(path, self.state_dict(), {**self.progress(), **(extra or {})})

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint; return its metadata. Nothing changes if it does not fit.

        Args:
            path: of the file.
            strict: refuse what another model, loss or optimizer has made; else the metadata lists
                the differences, as ``"differences"``.
        """
        loaded = self.read(path, strict=strict)
        self.take(loaded)
        return loaded.meta

    def read(self, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedCheckpoint:
        """Return a checkpoint that :meth:`take` may take over; nothing changes."""
        tensors, meta = load_checkpoint(path)
        label = repr(os.fsdecode(path))
        if "step" not in meta:
            raise CheckpointError(
                f"{label}: no progress of a training run in it\n"
                "hint: load_weights() takes plain weights"
            )
        arrays, progress = self._arrays(tensors, label), self._progress.read(meta, label)
        return LoadedCheckpoint(
            arrays, progress, check_origin(meta, self.progress(), label, strict=strict)
        )

    def take(self, loaded: LoadedCheckpoint) -> None:
        """Continue from what :meth:`read` gave."""
        self._set_all(loaded.arrays)
        self._set_progress(loaded.progress)

    export = export
