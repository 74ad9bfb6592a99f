"""Sessions of the old API: models by path, tensors that stay with the runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.compat.ort.build.embed import KEY
from onnxtrain.compat.ort.errors import OrtError, as_ort_errors
from onnxtrain.manifest import Manifest, ModelSpec
from onnxtrain.runtime import session as runtime


class Device:
    """A device from its name: ``cpu``, ``cuda`` or ``cuda:1``."""

    def __init__(self, name: str) -> None:
        self.kind, _, number = name.partition(":")
        self.number = int(number or 0)
        with as_ort_errors():
            runtime.check_device(self.kind)

    def value(self, array: np.ndarray) -> Any:
        """Return a tensor of the runtime."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        return runtime.runtime().OrtValue.ortvalue_from_numpy(array, self.kind, self.number)


class Model:
    """A model with its session and its description."""

    def __init__(
        self, source: str | os.PathLike[str] | bytes, role: str, device: Device, options: Any
    ) -> None:
        self.device = device
        self.path = source if isinstance(source, bytes) else os.fspath(source)
        with as_ort_errors():
            self.session = runtime.create(
                self.path, device=device.kind, device_id=device.number, options=options
            )
            self.manifest = _manifest(self.session, str(source)[:200])
        spec = self.manifest.model(role)
        if spec is None:
            raise OrtError(f"{source}: not a model for this place, no {role} model is described")
        self.spec: ModelSpec = spec

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name; arrays only if something fed is made of strings."""
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
    """Return zeros of a described tensor; sizes that are not known count as 0."""
    return np.zeros([d if isinstance(d, int) else 0 for d in shape], dtype)


def _manifest(session: Any, label: str) -> Manifest:
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise OrtError(
            f"{label}: the model does not say what its inputs are for\n"
            "hint: make it with onnxtrain.compat.ort.artifacts.generate_artifacts"
        )
    return Manifest.from_json(text, label)


def _is_text(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "OUS"


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy()
