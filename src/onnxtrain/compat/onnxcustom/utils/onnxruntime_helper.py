"""Devices and values of onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx

from onnxtrain.compat.ort.state import own_value
from onnxtrain.runtime import devices
from onnxtrain.runtime import session as runtime

_SMALL = 1 << 22  # bytes
_KINDS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}
_PROVIDERS = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


def _native() -> Any:
    return runtime.import_onnxruntime().capi.onnxruntime_pybind11_state


def get_ort_device(device: Any) -> Any:
    """Return onnxruntime's device for ``"cpu"``, ``"cuda"``, ``"gpu"``, ``"cuda:1"`` or another."""
    native = _native().OrtDevice
    if isinstance(device, native):
        return device
    if not isinstance(device, str):
        raise TypeError(f"expected a device or its name, got {type(device).__name__}")
    kind, _, number = device.partition(":")
    if kind not in _KINDS or (number and not number.isdigit()):
        raise ValueError(f"unknown device: {device!r} (expected one of cpu, cuda, gpu, cuda:0)")
    return native(getattr(native, _KINDS[kind])(), native.default_memory(), int(number or 0))


def get_ort_device_type(device: Any) -> int:
    """Return onnxruntime's number for a kind of device."""
    return get_ort_device(device).device_type()


def get_ort_device_from_session(sess: Any) -> Any:
    """Return the device of a session."""
    first = sess.get_providers()[0]
    options = sess.get_provider_options().get(first, {})
    return get_ort_device(f"{provider_to_device(first)}:{options.get('device_id', 0)}")


def provider_to_device(provider_name: str) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for an execution provider."""
    if provider_name not in _PROVIDERS:
        raise ValueError(f"unknown provider: {provider_name!r} (expected one of {[*_PROVIDERS]})")
    return _PROVIDERS[provider_name]


def ort_device_to_string(device: Any) -> str:
    """Return the name of a device."""
    if isinstance(device, str):
        return device
    kind = "cpu" if device.device_type() == _native().OrtDevice.cpu() else "cuda"
    return kind if device.device_id() == 0 else f"{kind}:{device.device_id()}"


def device_to_providers(device: Any) -> list[str]:
    """Return the execution providers for a device."""
    if ort_device_to_string(device) == "cpu":
        return ["CPUExecutionProvider"]
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def runtime_device(device: Any) -> str:
    """Return ``"cpu"`` or ``"cuda"``; raise if this installation lacks it."""
    kind = ort_device_to_string(device).partition(":")[0].replace("gpu", "cuda")
    devices.check(kind)
    return kind


def numpy_to_ort_value(array: np.ndarray, device: Any = None) -> Any:
    """Return a C++ OrtValue with a copy of an array; on the CPU without a device."""
    kind = "cpu" if device is None else runtime_device(device)
    return own_value(array, kind)._ortvalue


def vector_of(values: Iterable[Any]) -> Any:
    """Return an ``OrtValueVector`` of OrtValues."""
    vector = _native().OrtValueVector()
    for value in values:
        vector.push_back(getattr(value, "_ortvalue", value))
    return vector


def to_numpy(value: Any) -> np.ndarray:
    """Return the array in an OrtValue of either kind, or the array itself."""
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def create_session(model: onnx.ModelProto, device: str) -> Any:
    """Return a session; small models get one thread: several pools would wait for each other."""
    data = model.SerializeToString()
    return runtime.create(data, device=device, threads=1 if len(data) < _SMALL else None)
