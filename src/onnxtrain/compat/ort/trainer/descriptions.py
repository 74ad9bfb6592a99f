"""What ORTTrainer is told about a model: names, shapes and which output is the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Shape = Sequence[int | str]


class IODescription:
    """An input or output: its name, and its shape of numbers and names of any number."""

    def __init__(
        self, name: str, shape: Shape, dtype: Any = None, num_classes: int | None = None
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """The inputs of a model, labels included, and its outputs, the loss first."""

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = list(inputs)
        self.outputs_ = list(outputs)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Either description in one form."""

    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]
    outputs: tuple[str, ...]
    loss: str

    @classmethod
    def of(cls, description: ModelDescription | Mapping[str, Any]) -> Signature:
        """Read a description.

        Raises:
            ValueError: if it is not one, or has not exactly one loss.
        """
        if isinstance(description, ModelDescription):
            inputs = tuple((i.name_, tuple(i.shape_)) for i in description.inputs_)
            outputs = tuple(o.name_ for o in description.outputs_)
            if not outputs:
                raise ValueError("the description has no output")
            return cls(inputs, outputs, outputs[0])
        if set(description) != {"inputs", "outputs"}:
            raise ValueError("a description has the keys 'inputs' and 'outputs', and no other")
        inputs = tuple((i[0], _shape(i[1])) for i in description["inputs"])
        outputs = tuple(o[0] for o in description["outputs"])
        marked = [o[0] for o in description["outputs"] if len(o) > 2 and o[2]]
        if len(marked) != 1:
            raise ValueError(f"exactly one output must be marked as the loss, got {len(marked)}")
        return cls(inputs, outputs, marked[0])

    @property
    def axes(self) -> list[dict[int, str]]:
        """The symbolic axes of the inputs."""
        return [{i: d for i, d in enumerate(s) if isinstance(d, str)} for _, s in self.inputs]


def _shape(shape: Any) -> tuple[int | str, ...]:
    if not isinstance(shape, list | tuple) or not all(isinstance(d, int | str) for d in shape):
        raise ValueError(f"a shape is a list of numbers and names: {shape!r}")
    return tuple(shape)


__all__ = ["IODescription", "ModelDescription", "Signature"]
