"""Updates of a module's parameters from its gradients."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx

from onnxtrain.compat.ort.api.module import Module
from onnxtrain.compat.ort.api.running import Model
from onnxtrain.compat.ort.build.embed import INITIAL_LR
from onnxtrain.compat.ort.build.tensor_optimizer import flatten, takes_sequences
from onnxtrain.compat.ort.errors import OrtError


class Optimizer:
    """Steps of an optimizer model.

    Args:
        optimizer_uri: path of the optimizer model, flat or over sequences.
        module: whose parameters are updated.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._module = module
        self._store = module._state._state
        source: Any = optimizer_uri
        if os.fspath(optimizer_uri).endswith(".onnx"):
            proto = onnx.load(optimizer_uri)
            if takes_sequences(proto):
                shapes = {t.name: t for t in module._train.spec.inputs_of("parameter")}
                source = flatten(proto, list(shapes.values())).SerializeToString()
        self._model = Model(source, "optimizer", module._device, module._options)
        self._initial = float(self._model.manifest.optimizer.get("lr", INITIAL_LR))
        self._slots = {s.name: s for s in self._model.manifest.state}

    def step(self) -> None:
        """Update the parameters with the gradients as they are; the gradients stay."""
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
        """Set the learning rate of the next steps; checkpoints keep it."""
        self._store.lr = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._initial if self._store.lr is None else self._store.lr
