"""A model that is trained and evaluated batch by batch."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from onnxtrain.compat.ort.api.checkpoint_state import CheckpointState
from onnxtrain.compat.ort.api.running import Device, Model, zeros
from onnxtrain.compat.ort.build.export import export_for_inference
from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.manifest import TensorSpec

_DRAWS = 2**24  # float32 counts that far exactly
_EMPTY = "Please load the model parameters first."


class Module:
    """Training and evaluation steps of a model.

    Args:
        train_model_uri: path of the training model.
        state: parameters to begin with, which the steps change.
        eval_model_uri: path of the evaluation model, if steps are to be evaluated or exported.
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
                "hint: generate_artifacts, or save_checkpoint(block.parameters(), ...), writes all"
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

        Arrays if any input is an array, else OrtValues; a single output comes without a tuple. An
        input that is ``None`` is left out.
        """
        model = self._model()
        if self._state._state.nominal:
            raise OrtError(_EMPTY)
        names = self.input_names()
        if len(user_inputs) != len(names):
            raise OrtError(
                f"{len(user_inputs)} inputs given, the model takes {len(names)}: {', '.join(names)}"
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
                # The gradient of an input has that input's size, which the next batch may change.
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
                "There is no evaluation model\nhint: give Module(..., eval_model_uri=...)"
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
        """Let the next training step overwrite the gradients; until then they stay."""
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
        """Set the parameters from a vector that :meth:`get_contiguous_parameters` gave."""
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
        at = 0
        for t in self._parameters(trainable_only):
            count = math.prod(_sizes(t))
            store.values[t.name] = np.array(flat[at : at + count].reshape(_sizes(t)), t.dtype)
            at += count

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write the part of the evaluation model that makes some values, with trained weights."""
        if self._eval is None:
            raise OrtError(
                "There is no evaluation model\nhint: give Module(..., eval_model_uri=...)"
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
        """Return the names of what a step returns, in order."""
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
