"""``onnxruntime.training.api``: checkpoint state, module, optimizer, learning rate scheduler.

``Parameter``, ``Parameters`` and ``Properties`` are views of a checkpoint's state. ``Model`` and
``Device`` run a model file with tensors that stay on the device between calls.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.compat.ort.errors import OrtError, OrtTypeError, as_ort_errors
from onnxtrain.compat.ort.models import (
    INITIAL_LR,
    KEY,
    export_for_inference,
    flatten,
    uses_sequences,
)
from onnxtrain.compat.ort.state import Store, to_array
from onnxtrain.manifest import Manifest, ModelSpec, TensorSpec
from onnxtrain.optim import Constant, Linear, Warmup
from onnxtrain.runtime import devices
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import import_onnxruntime


class Parameter:
    """A parameter of the model: a view of the state."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """A copy of its value; a new value needs the same shape and type."""
        return self._store.array(self._name)

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._store.set(self._name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """Its gradient; zeros before the first step, ``None`` if it is frozen."""
        gradient = self._store.gradients.get(self._name)
        return None if gradient is None else to_array(gradient)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._name in self._store.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters, sorted by name."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Parameter:
        self._check(name)
        if name not in self._store.values:
            raise OrtError(
                f"The parameter {name} has no value yet. Please load the parameter states first"
            )
        return Parameter(self._store, name)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self._check(name)
        if self._store.nominal:
            raise OrtError(
                f"The parameter {name} cannot be set. Please load all the parameter states first"
            )
        self._store.set(name, value)

    def _check(self, name: str) -> None:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")

    def __contains__(self, name: object) -> bool:
        return name in self._store.trainable or name in self._store.frozen

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, self[name]) for name in self._store.parameters)

    def __len__(self) -> int:
        return len(self._store.parameters)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._store.parameters)})"


class Properties:
    """The user's numbers and strings in the state, sorted by name."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._store.properties[name]

    def __setitem__(self, name: str, value: float | str) -> None:
        if isinstance(value, str):
            plain: int | float | str = value
        elif isinstance(value, bool | int | np.integer | np.bool_):
            plain = int(value)
        elif isinstance(value, float | np.floating):
            plain = float(np.float32(value))
        else:
            raise OrtTypeError(
                f"A property is an int, a float or a str, not {type(value).__name__}"
            )
        self._store.properties[name] = plain

    def __contains__(self, name: object) -> bool:
        return name in self._store.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        return iter(sorted(self._store.properties.items()))

    def __len__(self) -> int:
        return len(self._store.properties)

    def __repr__(self) -> str:
        return f"Properties({', '.join(sorted(self._store.properties))})"


class CheckpointState:
    """Parameters, gradients, optimizer state and properties of a training run.

    Create one with :meth:`load_checkpoint`.
    """

    def __init__(self, state: Store) -> None:
        if not isinstance(state, Store):
            raise OrtTypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._state = state

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Load a full or nominal checkpoint, of onnxtrain or of onnxruntime-training."""
        return cls(Store.load(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Write the state to a file; it always includes the learning rate."""
        state._state.save(checkpoint_uri, optimizer=include_optimizer_state)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return Parameters(self._state)

    @property
    def properties(self) -> Properties:
        """The user's properties by name."""
        return Properties(self._state)

    @property
    def seed(self) -> int:
        """Random seed of dropout masks, combined with the step."""
        return self._state.seed

    @seed.setter
    def seed(self, value: int) -> None:
        if not 0 <= int(value) < 2**24:
            raise OrtError(f"The seed must be in [0, 2**24), got {value}")
        self._state.seed = int(value)


class Device:
    """A device, given by name: ``cpu``, ``cuda`` or ``cuda:1``."""

    def __init__(self, name: str) -> None:
        with as_ort_errors():
            self.entry = devices.check(name)

    def value(self, array: np.ndarray) -> Any:
        """Return an OrtValue with a copy of the array on this device."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, *self.entry.memory)


class Model:
    """A model file with its session and its manifest entry."""

    def __init__(
        self, source: str | os.PathLike[str] | bytes, role: str, device: Device, options: Any
    ) -> None:
        self.device = device
        self.path = source if isinstance(source, bytes) else os.fspath(source)
        with as_ort_errors():
            self.session = runtime.create(self.path, device=device.entry, options=options)
            self.manifest = _manifest(self.session, str(source)[:200])
        spec = self.manifest.model(role)
        if spec is None:
            raise OrtError(
                f"{source}: not the {role} model, its manifest describes no {role} model"
            )
        self.spec: ModelSpec = spec

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name: OrtValues, or arrays if any input has strings."""
        names = [t.name for t in self.spec.outputs]
        with as_ort_errors():
            if any(_is_text(value) for value in feeds.values()):
                plain = {n: _array(value) for n, value in feeds.items()}
                return dict(zip(names, runtime.run(self.session, names, plain), strict=True))
            values = {n: self._value(value) for n, value in feeds.items()}
            outputs = runtime.run_values(self.session, names, values)
        return dict(zip(names, outputs, strict=True))

    def _value(self, value: Any) -> Any:
        return self.device.value(value) if isinstance(value, np.ndarray) else value


def zeros(shape: Sequence[int | str], dtype: str) -> np.ndarray:
    """Return zeros of this shape; symbolic sizes become 0."""
    return np.zeros([d if isinstance(d, int) else 0 for d in shape], dtype)


def _manifest(session: Any, label: str) -> Manifest:
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise OrtError(
            f"{label}: the model has no manifest in its metadata\n"
            "hint: create it with onnxtrain.compat.ort.artifacts.generate_artifacts"
        )
    return Manifest.from_json(text, label)


def _is_text(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "OUS"


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy()


_DRAWS = 2**24  # float32 represents integers up to here exactly
_EMPTY = "Please load the model parameters first."


class Module:
    """Train and evaluate a model batch by batch.

    Args:
        train_model_uri: path of the training model.
        state: initial parameters, updated in place by training.
        eval_model_uri: path of the evaluation model, needed for evaluation and export.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        session_options: onnxruntime's options for the sessions.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        self.training = True
        self._state = state
        self._device = Device(device)
        self._options = session_options
        self._train = Model(train_model_uri, "train", self._device, session_options)
        self._eval = None
        if eval_model_uri is not None:
            self._eval = Model(eval_model_uri, "eval", self._device, session_options)
        self._reset = False
        self._check_state()
        self._forget_gradients()

    def _check_state(self) -> None:
        store = self._state._state
        names = {t.name for t in self._parameters(trainable_only=False)}
        unknown = sorted(n for n in names if n not in self._state.parameters)
        lost = [t.name for t in self._train.spec.inputs_of("buffer") if t.name not in names]
        unknown += [n for n in lost if n not in store.values]
        if unknown:
            raise OrtError(
                f"The checkpoint has no {', '.join(unknown)}, which the training model reads\n"
                "hint: write it with generate_artifacts or save_checkpoint(block.parameters(), ...)"
            )

    def _forget_gradients(self) -> None:
        store = self._state._state
        for t in self._train.spec.inputs_of("accumulator"):
            name = self._owner(t)
            if name in store.trainable and name not in store.gradients:
                store.gradients[name] = zeros(t.shape, t.dtype)

    def _owner(self, accumulator: TensorSpec) -> str:
        return accumulator.name.removesuffix("_grad.accumulation.buffer")

    def __call__(self, *user_inputs: Any) -> Any:
        """Run a training or evaluation step on inputs in the order of :meth:`input_names`.

        Return arrays if any input is an array, else OrtValues. A single output is returned without
        a tuple. Inputs that are ``None`` are omitted.
        """
        model = self._model()
        if self._state._state.nominal:
            raise OrtError(_EMPTY)
        names = self.input_names()
        if len(user_inputs) != len(names):
            raise OrtError(
                f"got {len(user_inputs)} inputs, the model has {len(names)}: {', '.join(names)}"
            )
        feeds = {n: _native(x) for n, x in zip(names, user_inputs, strict=True) if x is not None}
        outputs = self._train_step(feeds) if self.training else self._eval_step(feeds)
        values = [outputs[t.name] for t in model.spec.outputs_of("loss", "metric", "output")]
        if any(isinstance(x, np.ndarray) for x in user_inputs):
            results = [v if isinstance(v, np.ndarray) else v.numpy() for v in values]
        else:
            results = [self._device.value(v) if isinstance(v, np.ndarray) else v for v in values]
        return results[0] if len(results) == 1 else tuple(results)

    def _train_step(self, feeds: dict[str, Any]) -> dict[str, Any]:
        store, spec = self._state._state, self._train.spec
        feeds = {**feeds, **self._weights(self._train)}
        for t in spec.inputs:
            if t.role == "reset":
                feeds[t.name] = np.array([self._reset])
            elif t.role == "rng":
                feeds[t.name] = np.array([store.seed, (store.draws + 1) % _DRAWS], np.float32)
            elif t.role == "accumulator":
                name = self._owner(t)
                old = store.gradients.get(name)
                # Gradients of inputs are not in the state: their size changes with the batch.
                feeds[t.name] = np.zeros(_shape(feeds[name]), t.dtype) if old is None else old
        outputs = self._train.run(feeds)
        for t in spec.outputs:
            if t.role == "gradient":
                name = t.name.removesuffix("_grad.accumulation.out")
                if name in store.gradients:
                    store.gradients[name] = outputs[t.name]
            elif t.role == "buffer" and t.feeds is not None:
                store.values[t.feeds] = outputs[t.name]
        self._reset = False
        store.draws += 1
        return outputs

    def _eval_step(self, feeds: dict[str, Any]) -> dict[str, Any]:
        assert self._eval is not None
        return self._eval.run({**feeds, **self._weights(self._eval)})

    def _weights(self, model: Model) -> dict[str, Any]:
        store = self._state._state
        return {
            t.name: store.values[t.name]
            for t in model.spec.inputs_of("parameter", "frozen", "buffer")
        }

    def _model(self) -> Model:
        if self.training:
            return self._train
        if self._eval is None:
            raise OrtError(
                "The module has no evaluation model\nhint: pass Module(..., eval_model_uri=...)"
            )
        return self._eval

    def train(self, mode: bool = True) -> Module:
        """Switch to training, or with ``False`` to evaluation."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Switch to evaluation."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Reset the gradients at the start of the next training step."""
        self._reset = True

    def _parameters(self, trainable_only: bool) -> list[TensorSpec]:
        named = self._state.parameters
        specs = self._train.spec.inputs_of("parameter", "frozen", "buffer")
        parameters = [t for t in specs if t.role != "buffer" or t.name in named]
        return [t for t in parameters if t.role == "parameter"] if trainable_only else parameters

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of the parameters."""
        return sum(math.prod(_sizes(t)) for t in self._parameters(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """Return all parameters as one vector, in the order of the training model's inputs."""
        store = self._state._state
        if store.nominal:
            raise OrtError(_EMPTY)
        parts = [store.array(t.name).reshape(-1) for t in self._parameters(trainable_only)]
        return self._device.value(np.concatenate([np.empty(0, np.float32), *parts]))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the parameters from a vector of :meth:`get_contiguous_parameters`."""
        store = self._state._state
        if store.nominal and trainable_only:
            raise OrtError(
                "Not all parameters have a value. Please load all the parameter states first, "
                "with trainable_only=False"
            )
        flat = np.asarray(buffer if isinstance(buffer, np.ndarray) else buffer.numpy()).reshape(-1)
        size = self.get_parameters_size(trainable_only)
        if flat.size != size or flat.dtype != np.float32:
            raise OrtError(
                f"The buffer has {flat.size} elements of {flat.dtype}, the parameters have {size} "
                "of float32"
            )
        offset = 0
        for t in self._parameters(trainable_only):
            count = math.prod(_sizes(t))
            store.values[t.name] = np.array(
                flat[offset : offset + count].reshape(_sizes(t)), t.dtype
            )
            offset += count

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write the part of the evaluation model that computes these outputs, with its weights."""
        if self._eval is None:
            raise OrtError(
                "The module has no evaluation model\nhint: pass Module(..., eval_model_uri=...)"
            )
        if self._state._state.nominal:
            raise OrtError(_EMPTY)
        export_for_inference(
            self._eval.path, self._state._state, graph_output_names, inference_model_uri
        )

    def input_names(self) -> list[str]:
        """Return the names of the inputs of a step, in order."""
        return [t.name for t in self._model().spec.inputs_of("input", "target")]

    def output_names(self) -> list[str]:
        """Return the names of the outputs of a step, in order."""
        return [t.name for t in self._model().spec.outputs_of("loss", "metric", "output")]


def _native(x: Any) -> Any:
    """Return an array or OrtValue; torch tensors and lists become arrays."""
    if isinstance(x, np.ndarray) or hasattr(x, "device_name"):
        return x
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def _sizes(t: TensorSpec) -> list[int]:
    return [int(d) for d in t.shape]


def _shape(x: Any) -> list[int]:
    return list(x.shape) if isinstance(x, np.ndarray) else list(x.shape())


class Optimizer:
    """Update a module's parameters from its gradients with an optimizer model.

    Args:
        optimizer_uri: path of the optimizer model, over single tensors or sequences.
        module: the module to update.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._module = module
        self._store = module._state._state
        source: Any = optimizer_uri
        if os.fspath(optimizer_uri).endswith(".onnx"):
            proto = onnx.load(optimizer_uri)
            if uses_sequences(proto):
                shapes = {t.name: t for t in module._train.spec.inputs_of("parameter")}
                source = flatten(proto, list(shapes.values())).SerializeToString()
        self._model = Model(source, "optimizer", module._device, module._options)
        self._initial = float(self._model.manifest.optimizer.get("lr", INITIAL_LR))
        self._slots = {s.name: s for s in self._model.manifest.state}

    def step(self) -> None:
        """Update the parameters; the gradients do not change."""
        store = self._store
        if store.nominal:
            raise OrtError("Please load the model parameters first.")
        feeds: dict[str, Any] = {}
        for t in self._model.spec.inputs:
            if t.role == "lr":
                feeds[t.name] = np.array([self.get_learning_rate()], np.float32)
            elif t.role == "step":
                feeds[t.name] = np.array([store.step + 1], np.int64)
            elif t.role == "grad_scale":
                feeds[t.name] = np.array([1.0], np.float32)
            elif t.role == "parameter":
                feeds[t.name] = store.values[t.name]
            elif t.role == "gradient":
                feeds[t.name] = store.gradients[t.name.removesuffix("_grad")]
            elif t.role == "state":
                spec = self._slots[t.name]
                fresh = np.full(spec.shape, spec.init, spec.dtype)
                feeds[t.name] = store.state.get(t.name, fresh)
        outputs = self._model.run(feeds)
        for t in self._model.spec.outputs:
            if t.role == "parameter":
                store.values[str(t.feeds)] = outputs[t.name]
            elif t.role == "state":
                spec = self._slots[str(t.feeds)]
                store.set_state(spec.parameter, spec.slot, outputs[t.name])
        store.step += 1
        store.lr = self.get_learning_rate()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps; checkpoints include it."""
        self._store.lr = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._initial if self._store.lr is None else self._store.lr


class LinearLRScheduler:
    """Linear warmup to ``initial_lr`` in ``warmup_step_count`` steps, then linear decay to 0.

    The step is the optimizer's own count, so a resumed run continues the schedule.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        decay_steps = total_step_count - warmup_step_count
        after = Linear(decay_steps) if decay_steps > 0 else Constant(factor=0.0)
        self._schedule = Warmup(warmup_step_count, after)
        self._initial_lr = initial_lr
        self._optimizer = optimizer
        self.step()

    def step(self) -> None:
        """Set the learning rate of the optimizer's next step."""
        step = self._optimizer._store.step
        self._optimizer.set_learning_rate(self._schedule.at(self._initial_lr, step))
