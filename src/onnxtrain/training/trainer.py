"""Training on stock ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.directory import split_tensors
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.cuda_graph import can_capture
from onnxtrain.runtime.feeds import Feeder, feed, numpy_dtype, to_array
from onnxtrain.runtime.memory import CONTROL
from onnxtrain.runtime.values import ort_value
from onnxtrain.training.evaluation import evaluate_on
from onnxtrain.training.fit import fit
from onnxtrain.training.guards.batch_size import check_batch_size
from onnxtrain.training.guards.labels import explained
from onnxtrain.training.guards.one_thread import NotCopied, OneThread, alone
from onnxtrain.training.guards.origin import compared, graph_digests
from onnxtrain.training.guards.progress_meta import SEEDS, Loaded, Progress, check_lr
from onnxtrain.training.guards.target import advise_target
from onnxtrain.training.inference import Predictor, export
from onnxtrain.training.layouts import Fused, Separate, control_values, pick_layout
from onnxtrain.training.match_weights import fitting
from onnxtrain.training.reports.shown import ShownTrainer
from onnxtrain.training.results import Outputs, Parameters, StepResult
from onnxtrain.training.vector_layout import VectorLayout, vector_layout


class Trainer(ShownTrainer, NotCopied):
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
        if not 0 <= seed < SEEDS:
            raise OnnxTrainError(f"seed must lie in [0, 2**24): {seed}")
        self.in_use = OneThread()
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
            flat = vector_layout(
                artifacts, device=device, threads=threads, capture=capture, release=loaded
            )
        if layout == "auto":
            layout = "separate" if flat else pick_layout(artifacts, device)
        if layout == "fused" and self.manifest.accumulate > 1:
            raise OnnxTrainError("accumulated gradients need layout='separate'")
        self.layout = layout
        self._engine: Fused | Separate | VectorLayout
        if layout == "fused":
            self._engine = Fused(artifacts, device=device, threads=threads, capture=capture)
        else:
            self._engine = flat or Separate(artifacts, device=device, threads=threads)
            if capture and flat is None:
                can_capture(None, None, capture, device=device)
        advise_target(self._engine.spec, device)
        if loaded and device == "cpu":  # nobody else has them: one copy of all values is enough
            self.artifacts = artifacts.over(self._engine.view)
        self.batch_specs = self._engine.spec.inputs_of("input", "target")
        self._feed = Feeder(self.batch_specs)
        self._outputs = Outputs(self._engine.spec)
        self.loss_name, self.metric_names = self._outputs.loss, self._outputs.metrics
        self._evaluator: Any = None
        self._graphs: dict[str, str] | None = None
        self._predictor: Predictor | None = None
        self._differentiator: Separate | None = None

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
        """The models that a step runs, as :func:`onnxtrain.runtime.placement.placement` takes."""
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

    @alone
    def step(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one batch, given by position or by name.

        Raises:
            ShapeError: if the batch or a label does not fit; nothing has changed then.
        """
        return self.commit(self.compute(self._feed(batch, named)))

    @alone
    def compute(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a step on arrays that fit, but change nothing yet."""
        check_batch_size(self.manifest.options.get("above_one"), self.batch_specs, feeds)
        control = self._control(self._engine.spec, self.global_step + 1, micro=self._micro)
        try:
            return self._engine.compute({**feeds, **control})
        except OnnxTrainError as error:
            raise explained(self, error, feeds) from error

    @alone
    def commit(self, outputs: Mapping[str, np.ndarray]) -> StepResult:
        """Take over what the last :meth:`compute` found, and update when enough is accumulated."""
        number = self.global_step + 1
        self._engine.commit()
        if isinstance(self._engine, Fused):
            self.global_step = number
            return self._outputs.result(outputs, number, updated=True)
        self._micro += 1
        updated = self._micro >= self.manifest.accumulate
        if updated:
            self.flush()
        return self._outputs.result(outputs, number, updated=updated)

    @alone
    def flush(self) -> bool:
        """Update with the gradients accumulated so far; ``False`` if there are none."""
        if not self._micro:
            return False
        assert not isinstance(self._engine, Fused)
        number = self.global_step + 1
        scale = 1.0 / self._micro
        self._engine.update_parameters(self._control(self._engine.update, number, scale=scale))
        self.global_step, self._micro = number, 0
        return True

    def _control(
        self, spec: ModelSpec, number: int, *, micro: int = 0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        # Every batch has a draw of its own, counted so that float32 holds it exactly.
        draw = ((number - 1) * self.manifest.accumulate + micro + 1) % SEEDS
        numbers = {"lr": self._lr, "step": number, "rng": (self.seed, draw)}
        numbers |= {"grad_scale": scale, "reset": micro == 0}
        return control_values(self._controls(spec), numbers)

    def _controls(self, spec: ModelSpec) -> list[TensorSpec]:
        """Return the inputs that the trainer sets by itself; looked up once per model."""
        if spec.role not in self._control_specs:
            self._control_specs[spec.role] = spec.inputs_of(*CONTROL)
        return self._control_specs[spec.role]

    @alone
    def gradients(self, *batch: Any, **named: Any) -> dict[str, np.ndarray]:
        """Return the gradients of one batch by parameter name; nothing is updated."""
        if self._differentiator is None:
            self._differentiator = Separate(
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

    @alone
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
                raise explained(self, error, feeds) from error
        else:  # weights stay where they are
            values = {n: ort_value(a, self.device) for n, a in feeds.items()}
            values.update({n: self._engine.value(n) for n in own})
            results = runtime.run_values(self._evaluator, outputs.names, values)
            arrays = [np.array(r.numpy()) for r in results]
        arrays = dict(zip(outputs.names, arrays, strict=True))
        return outputs.result(arrays, self.global_step, updated=False)

    evaluate = evaluate_on
    fit = fit

    @alone
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

    @alone
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

    @alone
    def _set_all(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._engine.write(name, array)
        self._micro = 0

    @alone
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
        arrays = fitting(weights, self.manifest, strict=strict)
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

    def read(self, path: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
        """Return a checkpoint that :meth:`take` may take over; nothing changes."""
        tensors, meta = load_checkpoint(path)
        label = repr(os.fsdecode(path))
        if "step" not in meta:
            raise CheckpointError(
                f"{label}: no progress of a training run in it\n"
                "hint: load_weights() takes plain weights"
            )
        arrays, progress = self._arrays(tensors, label), self._progress.read(meta, label)
        return Loaded(arrays, progress, compared(meta, self.progress(), label, strict=strict))

    def take(self, loaded: Loaded) -> None:
        """Continue from what :meth:`read` gave."""
        self._set_all(loaded.arrays)
        self._set_progress(loaded.progress)

    export = export
