"""The state of a training run and its checkpoint file; conversions between arrays and OrtValues."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.checkpoint.ort_checkpoint import is_odtc, read_odtc
from onnxtrain.compat.ort.errors import OrtError, OrtTypeError, as_ort_errors
from onnxtrain.graph.io.limits import open_regular
from onnxtrain.runtime import session as runtime

_OPTIMIZER = "optim/"

Tensor = Any
"""An array, or an OrtValue once a session has made it."""


@dataclasses.dataclass
class Store:
    """Parameters, statistics, gradients and optimizer state.

    A nominal store has the names of parameters without values; these are set later.
    """

    trainable: list[str] = dataclasses.field(default_factory=list)
    frozen: list[str] = dataclasses.field(default_factory=list)
    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Parameters and running statistics."""
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Optimizer state by ``<parameter>.<slot>``."""
    slots: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Parameter and slot of each entry of ``state``."""
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    properties: dict[str, int | float | str] = dataclasses.field(default_factory=dict)
    step: int = 0
    lr: float | None = None
    seed: int = 0
    draws: int = 0
    """Number of training steps that have drawn random numbers."""
    manifest: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        trainable: Mapping[str, np.ndarray],
        frozen: Mapping[str, np.ndarray],
        buffers: Mapping[str, np.ndarray],
    ) -> Store:
        """Return a new store of these arrays."""
        return cls(list(trainable), list(frozen), {**trainable, **frozen, **buffers})

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, sorted."""
        return sorted([*self.trainable, *self.frozen])

    @property
    def nominal(self) -> bool:
        """Whether parameters have names without values."""
        return any(n not in self.values for n in self.parameters)

    def nominal_copy(self) -> Store:
        """Return a copy without the values of parameters."""
        named = {*self.trainable, *self.frozen}
        rest = {n: v for n, v in self.values.items() if n not in named}
        return dataclasses.replace(self, values=rest, state={}, slots={}, gradients={})

    def array(self, name: str) -> np.ndarray:
        """Return a copy of a parameter or statistic."""
        return to_array(self.values[name])

    def set(self, name: str, array: np.ndarray) -> None:
        """Replace a parameter with a value of the same shape and type."""
        array, old = np.asarray(array), self.array(name)
        for what, expected, got in (
            ("shape", old.shape, array.shape),
            ("type", old.dtype, array.dtype),
        ):
            if expected != got:
                raise OrtError(
                    f"Parameter data {what} mismatch. Expected: {expected}, Got: {got} for {name}"
                )
        self.values[name] = np.array(array)

    def set_state(self, parameter: str, slot: str, value: Tensor) -> None:
        """Replace optimizer state."""
        name = f"{parameter}.{slot}"
        self.state[name], self.slots[name] = value, (parameter, slot)

    def save(self, path: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Write a checkpoint atomically."""
        tensors = {n: self.array(n) for n in self.values}
        if optimizer:
            tensors |= {
                state_key(*self.slots[n]): to_array(value) for n, value in self.state.items()
            }
        meta: dict[str, Any] = {
            "parameters": {"trainable": self.trainable, "frozen": self.frozen},
            "properties": self.properties,
            "seed": self.seed,
            "draws": self.draws,
            "step": self.step if optimizer else 0,
        }
        if self.lr is not None:
            meta["lr"] = self.lr
        if self.manifest is not None:
            meta["manifest"] = self.manifest
        with as_ort_errors():
            save_checkpoint(path, tensors, meta)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Store:
        """Read a checkpoint of onnxtrain or of onnxruntime-training."""
        with as_ort_errors():
            if _is_odtc(path):
                return _from_odtc(path)
            tensors, meta = load_checkpoint(path)
        manifest = meta.get("manifest")
        names = [n for n in tensors if not n.startswith(_OPTIMIZER)]
        known = meta.get("parameters")
        if known is None:  # a checkpoint of a Trainer, or plain weights
            listed = [w["name"] for w in (manifest or {}).get("parameters", ())]
            known = {"trainable": listed or names, "frozen": []}
        store = cls(
            trainable=list(known["trainable"]),
            frozen=list(known["frozen"]),
            values={n: tensors[n] for n in names},
            properties=dict(meta.get("properties", {})),
            step=int(meta.get("step", 0)),
            lr=meta.get("lr"),
            seed=int(meta.get("seed", 0)),
            draws=int(meta.get("draws", meta.get("step", 0))),
            manifest=manifest,
        )
        for key in tensors.keys() - set(names):
            store.set_state(*_state_name(key), tensors[key])
        return store


def to_array(value: Tensor) -> np.ndarray:
    """Return a tensor as an array that shares no memory with other arrays."""
    return np.array(value) if isinstance(value, np.ndarray) else value.numpy()


def _is_odtc(path: str | os.PathLike[str]) -> bool:
    try:
        with open_regular(path) as file:
            return is_odtc(file.read(8))
    except OSError:
        return False  # load_checkpoint reports the error


def _from_odtc(path: str | os.PathLike[str]) -> Store:
    checkpoint = read_odtc(path)
    store = Store.of(checkpoint.parameters, checkpoint.frozen, {})
    store.properties = dict(checkpoint.properties)
    store.step, store.draws = checkpoint.step, checkpoint.step
    store.lr = checkpoint.lr or None
    for key, value in checkpoint.tensors().items():
        if key.startswith(_OPTIMIZER):
            store.set_state(*_state_name(key), value)
    return store.nominal_copy() if checkpoint.nominal else store


def _state_name(key: str) -> tuple[str, str]:
    """Return parameter and slot of ``optim/<slot>/<parameter>``."""
    slot, parameter = key.removeprefix(_OPTIMIZER).split("/", 1)
    return parameter, slot


def as_list(values: Iterable[Any]) -> list[Any]:
    """Return the elements of a list or of onnxruntime's ``OrtValueVector``."""
    if hasattr(values, "__getitem__") and hasattr(values, "__len__"):
        vector: Any = values  # onnxruntime's vectors support indexing, but not iteration
        return [vector[i] for i in range(len(vector))]
    return list(values)


def as_value(value: Any, device: str) -> Any:
    """Return a Python OrtValue for an OrtValue of Python or C++, an array or a DLPack tensor."""
    kind = runtime.import_onnxruntime().OrtValue
    if isinstance(value, kind):
        return value
    if type(value).__name__ == "OrtValue":
        return kind(value)
    if isinstance(value, np.ndarray | np.generic):
        return kind.ortvalue_from_numpy(np.ascontiguousarray(value), device)
    if hasattr(value, "__dlpack__"):
        return kind.from_dlpack(value)
    raise OrtTypeError(
        f"expected an OrtValue or an array, got {type(value).__name__}\n"
        "hint: convert it with onnxruntime.OrtValue.ortvalue_from_numpy"
    )


def fitting_value(
    value: Any, expected: Any, what: str, dims: Sequence[Any], *, flat: bool = False
) -> Any:
    """Return a value with the shape of an input of a session.

    As in onnxruntime-training, ``[3]`` may be fed for an initializer ``[1, 3]``.

    Args:
        value: an OrtValue.
        expected: the session's description of the input.
        what: ``forward`` or ``backward``, for the message.
        dims: the shape; strings are sizes that may vary.
        flat: whether all elements may be given as one row or vector.

    Raises:
        CompatError: if type or shape are others.
    """
    shape = list(value.shape())
    if value.data_type() != expected.type:
        raise OrtError(
            f"Error in {what} pass execution: {expected.name!r} is {value.data_type()} {shape}\n"
            f"hint: the model expects {expected.type} {list(dims)}"
        )
    fixed = zip(shape, dims, strict=False)
    if len(shape) == len(dims) and all(not isinstance(d, int) or s == d for s, d in fixed):
        return value
    long, wanted = ([d for d in sizes if d != 1] for sizes in (shape, dims))
    if all(isinstance(d, int) for d in dims) and (
        long == wanted or (flat and len(long) < 2 and math.prod(shape) == math.prod(dims))
    ):
        return as_value(value.numpy().reshape(list(dims)), value.device_name())
    raise OrtError(
        f"Error in {what} pass execution: {expected.name!r} has shape {shape}\n"
        f"hint: the model expects {list(dims)}"
    )


def write_fetches(fetches: Any, values: list[Any]) -> None:
    """Overwrite a list or onnxruntime's ``OrtValueVector`` with values.

    The vector cannot drop or replace its elements, so its tensors are overwritten in place.

    Raises:
        CompatError: if a vector has another number of elements, or one of another shape or type.
    """
    if not hasattr(fetches, "push_back"):
        fetches[:] = values
        return
    if len(fetches) == 0:
        for value in values:
            fetches.push_back(value._ortvalue)
        return
    old = [f"{x.data_type()} {list(x.shape())}" for x in as_list(fetches)]
    new = [f"{x.data_type()} {list(x.shape())}" for x in values]
    if old != new:
        raise OrtError(
            f"the vector for the results holds {', '.join(old)}; the results are {', '.join(new)}\n"
            "hint: pass a new OrtValueVector()"
        )
    for i, value in enumerate(values):
        fetches[i].update_inplace(value.numpy())


def own_value(array: np.ndarray, device: str = "cpu", index: int = 0) -> Any:
    """Return an OrtValue with a copy of an array: on the CPU, onnxruntime would share its memory.

    Args:
        array: numbers.
        device: ``"cpu"`` or ``"cuda"``.
        index: of the device.
    """
    kind = runtime.import_onnxruntime().OrtValue
    array = np.ascontiguousarray(array).reshape(array.shape)
    if device != "cpu" or not array.size:
        return kind.ortvalue_from_numpy(array, device, index)
    value = kind.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, device, index)
    value.update_inplace(array)
    return value
