"""How batches reach the memory that a session reads, and how results come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.pinned import Staging, staging_for
from onnxtrain.runtime.values import ort_value

CONTROL = ("lr", "step", "rng", "grad_scale", "reset")
"""Roles of the small inputs that a trainer sets by itself."""

Place = tuple[Any, Callable[[], np.ndarray]]
"""What the runtime writes a result to, and what reads it from there."""


class Memory(Protocol):
    """The part of a binding that depends on where a session runs."""

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind what is bound once, before the first batch."""
        ...

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bring one input of a batch."""
        ...

    def place(self, t: TensorSpec) -> Place | None:
        """Return a place for a result that is the same in every run, if it is to have one."""
        ...


class HostMemory:
    """The memory of the CPU: arrays of the caller are read where they are."""

    def __init__(self) -> None:
        self._small: dict[str, np.ndarray] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Give learning rate, step and the like a place that is written at each run."""
        for t in spec.inputs_of(*CONTROL):
            array = np.zeros(_sizes(t), numpy_dtype(t.dtype))
            self._small[t.name] = array
            binding.bind_ortvalue_input(t.name, ort_value(array))

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Bind an array as it is, or copy it if it is small."""
        if name in self._small:
            self._small[name][...] = array
        elif array.dtype == ml_dtypes.bfloat16:
            binding.bind_ortvalue_input(name, ort_value(array))
        else:  # the same memory at a fifth of the price; the binding holds the array
            binding.bind_cpu_input(name, array)

    def place(self, t: TensorSpec) -> Place | None:
        """Keep a place for losses and metrics; all else comes in memory of its own."""
        if t.shape or t.role not in ("loss", "metric"):
            return None
        array = np.zeros((), numpy_dtype(t.dtype))
        return ort_value(array), lambda: np.array(array)


class DeviceMemory:
    """Memory of a device: batches are copied there, to addresses that stay.

    Args:
        device: where the session runs.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._fed: dict[str, tuple[np.ndarray, Any]] = {}
        self._staging: dict[str, Staging | None] = {}

    def prepare(self, binding: Any, spec: ModelSpec) -> None:
        """Bind nothing: an input gets its place when it comes first."""

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        """Copy an array to where it was last time; a new shape gets a new place."""
        known = self._fed.get(name)
        if known is None or known[0].shape != array.shape:
            own = np.array(array)  # where memory is shared, the caller's must not be written
            value = ort_value(own, self._device)
            binding.bind_ortvalue_input(name, value)
            self._fed[name] = (own, value)
            self._staging[name] = staging_for(own)
            return
        last, value = known
        if array.size != 1:
            staging = self._staging[name]
            staged = staging is not None and staging.fits(array)
            value.update_inplace(staging.filled(array) if staging and staged else array)
        elif last.item() != array.item():  # a copy costs as much as a small kernel
            value.update_inplace(array)
            last[...] = array

    def place(self, t: TensorSpec) -> Place | None:
        """Keep a place for every result of fixed size, so that a run can be captured."""
        sizes = _sizes(t)
        if len(sizes) != len(t.shape):
            return None
        value = ort_value(np.zeros(sizes, numpy_dtype(t.dtype)), self._device)
        return value, lambda: np.array(value.numpy())


def memory_of(device: str) -> Memory:
    """Return how to reach the memory of a device."""
    return HostMemory() if device == "cpu" else DeviceMemory(device)


def _sizes(t: TensorSpec) -> list[int]:
    return [d for d in t.shape if isinstance(d, int)]
