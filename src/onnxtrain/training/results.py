"""Results of a trainer: steps and parameters."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from onnxtrain.errors import ParameterError, ShapeError
from onnxtrain.manifest import ModelSpec, WeightSpec
from onnxtrain.runtime.feeds import to_array


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Loss, metrics and outputs of a batch; ``float(result)`` is the loss."""

    loss: float
    metrics: dict[str, float]
    outputs: dict[str, np.ndarray]
    step: int
    updated: bool = True
    """Whether parameters were updated: with gradient accumulation not after every batch, and
    never if the loss is not finite."""

    def __float__(self) -> float:
        return self.loss


class Outputs:
    """Names of a model's loss, metrics and other outputs."""

    def __init__(self, spec: ModelSpec) -> None:
        (self.loss,) = (t.name for t in spec.outputs_of("loss"))
        self.metrics = [t.name for t in spec.outputs_of("metric")]
        self.others = [t.name for t in spec.outputs_of("output")]

    @property
    def names(self) -> list[str]:
        """All names: loss, metrics, other outputs."""
        return [self.loss, *self.metrics, *self.others]

    def result(self, outputs: Mapping[str, np.ndarray], step: int, *, updated: bool) -> StepResult:
        """Return the result of a step from the model's outputs."""
        return StepResult(
            loss=float(outputs[self.loss]),
            metrics={n: float(outputs[n]) for n in self.metrics},
            outputs={n: outputs[n] for n in self.others if n in outputs},
            step=step,
            updated=updated,
        )


class Parameters(MutableMapping[str, np.ndarray]):
    """Parameters by name: read a copy with ``[...]``, set with ``[...] = array``."""

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        read: Callable[[str], np.ndarray],
        write: Callable[[str, np.ndarray], None],
        kind: str = "trainable parameter",
    ) -> None:
        self._specs, self._read, self._write, self._kind = specs, read, write, kind

    def __getitem__(self, name: str) -> np.ndarray:
        self._check(name)
        return np.array(self._read(name))

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        array, spec = to_array(value), self._specs[name]
        if tuple(array.shape) != spec.shape:
            raise ShapeError(f"{name!r} has shape {list(spec.shape)}, got {list(array.shape)}")
        self._write(name, array.astype(self._read(name).dtype))

    def _check(self, name: str) -> None:
        if name in self._specs:
            return
        near = difflib.get_close_matches(str(name), list(self._specs), 5, cutoff=0) or ["none"]
        raise ParameterError(
            f"no {self._kind} {name!r}; nearest: {', '.join(near)}\n"
            "hint: frozen weights are constants of the artifacts; train them by train= and freeze= "
            "of build"
        )

    def __delitem__(self, name: str) -> None:
        raise TypeError("parameters cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
