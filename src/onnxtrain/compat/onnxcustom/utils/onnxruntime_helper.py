"""Devices and values of onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from onnxtrain.errors import CompatError
from onnxtrain.runtime import session as runtime

_SMALL = 1 << 22  # bytes


def _native() -> Any:
    return runtime.import_onnxruntime().capi.onnxruntime_pybind11_state


def get_ort_device(device: Any) -> Any:
    """Return onnxruntime's device for ``"cpu"``, ``"cuda"``, ``"gpu"``, ``"cuda:1"`` or another."""
    if not isinstance(device, str):
        return device
    kind, _, number = device.partition(":")
    native = _native().OrtDevice
    index = int(number or 0)
    if kind == "cpu":
        return native(native.cpu(), native.default_memory(), index)
    if kind in ("cuda", "gpu"):
        return native(native.cuda(), native.default_memory(), index)
    raise CompatError(f"unknown device: {device!r} (expected one of cpu, cuda, gpu, cuda:0)")


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
    runtime.check_device(kind)
    return kind


def numpy_to_ort_value(array: np.ndarray, device: Any = "cpu") -> Any:
    """Return an OrtValue with the content of an array."""
    kind = ort_device_to_string(device).partition(":")[0].replace("gpu", "cuda")
    factory = runtime.import_onnxruntime().OrtValue
    if kind != "cpu" or not array.size:
        return factory.ortvalue_from_numpy(np.ascontiguousarray(array), kind, 0)
    # Memory of its own: ``value.numpy()`` is a view, which would outlive a shared array.
    value = factory.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, kind, 0)
    value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
    return value


def to_numpy(value: Any) -> np.ndarray:
    """Return the array in an OrtValue of either kind, or the array itself."""
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def create_session(model: onnx.ModelProto, device: str) -> Any:
    """Return a session; small models get one thread: several pools would wait for each other."""
    data = model.SerializeToString()
    return runtime.create(data, device=device, threads=1 if len(data) < _SMALL else None)
