"""Training on stock ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.directory import split_tensors
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.errors import CheckpointError, OnnxTrainError, ShapeError
from onnxtrain.graph.io import save as save_model
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import feed, to_array
from onnxtrain.runtime.layouts import Fused, Separate

_LARGE = 64 << 20  # bytes of parameters and state from which a second copy of them hurts


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step reports; ``float(result)`` is the loss."""

    loss: float
    metrics: dict[str, float]
    outputs: dict[str, np.ndarray]
    step: int
    updated: bool = True
    """Whether the parameters changed: not on every batch when gradients are accumulated."""

    def __float__(self) -> float:
        return self.loss


class Trainer:
    """Runs training steps of artifacts on onnxruntime.

    Args:
        artifacts: what :func:`onnxtrain.build` gave, or a directory.
        device: ``"cpu"`` or ``"cuda"``.
        layout: ``"fused"``, ``"separate"`` or ``"auto"``, which picks by size; both give the same
            numbers.
        seed: of dropout masks and of the order of the data.
        threads: of onnxruntime's pool; ``None`` takes all cores.
    """

    def __init__(
        self,
        artifacts: Artifacts | str | os.PathLike[str],
        *,
        device: str = "cpu",
        layout: str = "auto",
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        if not isinstance(artifacts, Artifacts):
            artifacts = Artifacts.load(artifacts)
        runtime.check_device(device)
        if layout not in ("auto", "fused", "separate"):
            raise OnnxTrainError(f"no such layout: {layout!r}\nhint: auto, fused or separate")
        if not 0 <= seed < 1 << 24:
            raise OnnxTrainError(f"seed must lie in [0, 2**24): {seed}")
        self.artifacts = artifacts
        self.manifest = artifacts.manifest
        self.device, self.threads, self.seed = device, threads, seed
        self.lr: float = float(artifacts.meta.get("lr", self.manifest.optimizer["lr"]))
        self.global_step: int = int(artifacts.meta.get("step", 0))
        self.properties: dict[str, int | float | str] = dict(artifacts.meta.get("properties", {}))
        self.seed = int(artifacts.meta.get("seed", seed)) if seed == 0 else seed
        self._micro = 0
        if layout == "auto":
            layout = self._pick()
        if layout == "fused" and self.manifest.accumulate > 1:
            raise OnnxTrainError("accumulated gradients need layout='separate'")
        self.layout = layout
        kind = Fused if layout == "fused" else Separate
        self._engine: Fused | Separate = kind(artifacts, device=device, threads=threads)
        self._evaluator: Any = None
        self._predictor: Any = None
        self._differentiator: Separate | None = None

    def _pick(self) -> str:
        if self.manifest.accumulate > 1:
            return "separate"
        size = sum(
            a.nbytes for a in (*self.artifacts.values.values(), *self.artifacts.state.values())
        )
        return "separate" if size > _LARGE else "fused"

    # -- training ---------------------------------------------------------------

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs and targets of a batch, in the order of positional arguments."""
        return [t.name for t in self._engine.spec.inputs_of("input", "target")]

    def step(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one batch, given by position or by name.

        Raises:
            ShapeError: if the batch does not fit; nothing has changed then.
        """
        feeds = feed(self._engine.spec.inputs_of("input", "target"), batch, named)
        number = self.global_step + 1
        if isinstance(self._engine, Fused):
            found = self._engine.step(feeds, self._control(self._engine.spec, number))
            self.global_step = number
            return self._result(found, number, updated=True)
        control = self._control(self._engine.spec, number, micro=self._micro)
        found = self._engine.accumulate(feeds, control)
        self._micro += 1
        updated = self._micro >= self.manifest.accumulate
        if updated:
            self._descend(number)
        return self._result(found, number, updated=updated)

    def flush(self) -> bool:
        """Update with what has been accumulated so far; ``False`` if there is nothing."""
        if not self._micro:
            return False
        self._descend(self.global_step + 1)
        return True

    def _descend(self, number: int) -> None:
        assert isinstance(self._engine, Separate)
        scale = 1.0 / self._micro
        self._engine.descend(self._control(self._engine.update, number, scale=scale))
        self.global_step, self._micro = number, 0

    def _control(
        self, spec: Any, number: int, *, micro: int = 0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for t in spec.inputs:
            if t.role == "lr":
                found[t.name] = np.array([self.lr], np.float32)
            elif t.role == "step":
                found[t.name] = np.array([number], np.int32 if t.dtype == "int32" else np.int64)
            elif t.role == "rng":
                found[t.name] = np.array([self.seed, self._draw(number, micro)], np.float32)
            elif t.role == "grad_scale":
                found[t.name] = np.array([scale], np.float32)
            elif t.role == "reset":
                found[t.name] = np.array([micro == 0])
        return found

    def _draw(self, number: int, micro: int) -> int:
        """Give the number of this batch's random draw; it must stay exact in float32."""
        return ((number - 1) * self.manifest.accumulate + micro + 1) % (1 << 24)

    def _result(self, found: Mapping[str, np.ndarray], number: int, *, updated: bool) -> StepResult:
        roles = {t.name: t.role for t in self._engine.spec.outputs}
        return StepResult(
            loss=float(found["loss"]),
            metrics={n: float(v) for n, v in found.items() if roles[n] == "metric"},
            outputs={n: v for n, v in found.items() if roles[n] == "output"},
            step=number,
            updated=updated,
        )

    def gradients(self, *batch: Any, **named: Any) -> dict[str, np.ndarray]:
        """Give the gradients of one batch by parameter name; nothing is updated."""
        if self._differentiator is None:
            self._differentiator = Separate(
                self.artifacts, device=self.device, threads=self.threads
            )
        engine = self._differentiator
        for name in (*self.artifacts.values, *self.artifacts.state):
            engine.write(name, self._engine.read(name))
        feeds = feed(engine.spec.inputs_of("input", "target"), batch, named)
        engine.accumulate(feeds, self._control(engine.spec, self.global_step + 1))
        names = [p.name for p in self.manifest.parameters]
        return dict(zip(names, engine.gradients().values(), strict=True))

    # -- evaluation and prediction -----------------------------------------------

    def evaluate_batch(self, *batch: Any, **named: Any) -> StepResult:
        """Give loss, metrics and outputs of one batch in evaluation mode."""
        spec = self.manifest.model("eval")
        if spec is None:
            raise CheckpointError("these artifacts have no eval model\nhint: build them again")
        if self._evaluator is None:
            self._evaluator = runtime.create(
                self.artifacts.source("eval"), device=self.device, threads=self.threads
            )
        feeds = feed(spec.inputs_of("input", "target"), batch, named)
        feeds.update(
            {t.name: self._engine.read(t.name) for t in spec.inputs_of("parameter", "buffer")}
        )
        found = dict(
            zip(
                (t.name for t in spec.outputs),
                runtime.run(self._evaluator, None, feeds),
                strict=True,
            )
        )
        roles = {t.name: t.role for t in spec.outputs}
        return StepResult(
            loss=float(found["loss"]),
            metrics={n: float(v) for n, v in found.items() if roles[n] == "metric"},
            outputs={n: v for n, v in found.items() if roles[n] == "output"},
            step=self.global_step,
            updated=False,
        )

    def predict(self, *positional: Any, **inputs: Any) -> dict[str, np.ndarray]:
        """Give the outputs of the plain model with the current weights."""
        spec = self.manifest.model("infer")
        assert spec is not None
        if self._predictor is None:
            self._predictor = runtime.create(
                _weights_as_inputs(self._inference(), self._weight_names()),
                device=self.device,
                threads=self.threads,
            )
        feeds = feed(spec.inputs, positional, inputs)
        known = {i.name for i in self._predictor.get_inputs()}
        feeds.update({n: self._engine.read(n) for n in self._weight_names() if n in known})
        names = [t.name for t in spec.outputs]
        return dict(zip(names, runtime.run(self._predictor, names, feeds), strict=True))

    def _inference(self) -> onnx.ModelProto:
        source = self.artifacts.source("infer")
        return onnx.load(source) if isinstance(source, str) else onnx.load_from_string(source)

    def _weight_names(self) -> list[str]:
        return [w.name for w in (*self.manifest.parameters, *self.manifest.buffers)]

    # -- values ------------------------------------------------------------------

    @property
    def parameters(self) -> Parameters:
        """The parameters by name: read with ``[...]``, set with ``[...] = array``."""
        return Parameters(self)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Give everything that a checkpoint holds, by the names it has there."""
        found = {n: self._engine.read(n) for n in self._weight_names()}
        for s in self.manifest.state:
            found[state_key(s.parameter, s.slot)] = self._engine.read(s.name)
        return found

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Set everything from what :meth:`state_dict` gave; nothing changes if something is off."""
        arrays = {n: to_array(v) for n, v in tensors.items()}
        values, state = split_tensors(self.manifest, arrays, "the state")
        for name, array in (*values.items(), *state.items()):
            self._engine.write(name, array)

    def load_weights(
        self, weights: Mapping[str, Any] | str | os.PathLike[str], *, strict: bool = True
    ) -> list[str]:
        """Set parameters and buffers from a state_dict or a safetensors file; give the names set.

        Args:
            weights: names to arrays or tensors, or a path.
            strict: refuse names that the model has not, and missing ones.
        """
        if isinstance(weights, str | os.PathLike):
            weights = load_checkpoint(weights)[0]
        known = {w.name: w for w in (*self.manifest.parameters, *self.manifest.buffers)}
        arrays = {n: to_array(v) for n, v in weights.items() if n in known}
        extra = [n for n in weights if n not in known and not n.startswith("optim/")]
        missing = [n for n in known if n not in arrays]
        if strict and (extra or missing):
            raise CheckpointError(
                f"weights do not fit: missing {missing[:5]}, unknown {extra[:5]}\nhint: strict=False"
            )
        for name, array in arrays.items():
            if tuple(array.shape) != known[name].shape:
                raise CheckpointError(
                    f"{name!r} has shape {list(array.shape)}, expected {list(known[name].shape)}"
                )
        for name, array in arrays.items():
            self._engine.write(name, array.astype(self._engine.read(name).dtype))
        return list(arrays)

    # -- files -------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Give what a checkpoint records besides tensors."""
        return {
            "lr": self.lr,
            "manifest": self.manifest.to_dict(hashes=False),
            "properties": self.properties,
            "seed": self.seed,
            "step": self.global_step,
        }

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint: whole, or the old file stays."""
        if self._micro:
            raise OnnxTrainError(
                "gradients are accumulated but not applied\nhint: call flush() before save()"
            )
        save_checkpoint(path, self.state_dict(), {**self.progress(), **(extra or {})})

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint; give its metadata. Nothing changes if it does not fit."""
        tensors, meta = load_checkpoint(path)
        values, state = split_tensors(self.manifest, tensors, repr(os.fsdecode(path)))
        for name, array in (*values.items(), *state.items()):
            self._engine.write(name, array)
        self.lr = float(meta.get("lr", self.lr))
        self.global_step = int(meta.get("step", self.global_step))
        self.seed = int(meta.get("seed", self.seed))
        self.properties = dict(meta.get("properties", {}))
        self._micro = 0
        return meta

    def export(self, path: str | os.PathLike[str], *, ema: bool = False) -> None:
        """Write the inference model with the current weights, or with their moving average."""
        if ema and self.manifest.options.get("ema") is None:
            raise OnnxTrainError("no moving average was kept\nhint: build(..., ema=0.999)")
        model = self._inference()
        parameters = {p.name for p in self.manifest.parameters}
        by_name = {t.name: t for t in model.graph.initializer}
        for name in self._weight_names():
            if name not in by_name:
                continue
            source = f"{name}.ema" if ema and name in parameters else name
            by_name[name].raw_data = np.ascontiguousarray(self._engine.read(source)).tobytes()
        del model.metadata_props[:]
        save_model(model, path)


class Parameters(MutableMapping[str, np.ndarray]):
    """The parameters of a trainer, read and set by name."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._specs = {p.name: p for p in trainer.manifest.parameters}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._specs:
            raise KeyError(name)
        return self._trainer._engine.read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._specs:
            raise KeyError(name)
        array, shape = to_array(value), self._specs[name].shape
        if tuple(array.shape) != shape:
            raise ShapeError(f"{name!r} has shape {list(shape)}, got {list(array.shape)}")
        self._trainer._engine.write(name, array)

    def __delitem__(self, name: str) -> None:
        raise TypeError("parameters cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _weights_as_inputs(model: onnx.ModelProto, names: list[str]) -> bytes:
    """Give the model with some initializers as inputs, so that a session need not be rebuilt."""
    work = ir.from_proto(model)
    for name in names:
        value = work.graph.initializers.get(name)
        if value is None:
            continue
        del work.graph.initializers[name]
        value.const_value = None
        work.graph.inputs.append(value)
    return ir.to_proto(work).SerializeToString()
