"""Several tensors as one vector: an optimizer that works element by element needs one update then.

A node of a graph costs some microseconds whatever its size, and the nodes of the update are many in
a small model. Which parameters are worth joining is for the caller to say.

>>> pack = Pack("all", ("w", "b"), ((2, 2), (2,)), np.dtype("float32"))
>>> vector = pack.join_arrays({"w": np.eye(2), "b": np.array([3.0, 4.0])})
>>> vector.tolist()
[1.0, 0.0, 0.0, 1.0, 3.0, 4.0]
>>> pack.split_array(vector)["b"].tolist()
[3.0, 4.0]
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim.base import Optimizer


@dataclasses.dataclass(frozen=True)
class Pack:
    """Tensors that lie one after the other in a vector; a single one may stay as it is.

    Args:
        name: of the vector.
        members: names of the tensors. One tensor under its own name is not reshaped.
        shapes: of the members.
        dtype: of all of them.
    """

    name: str
    members: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def joined(self) -> bool:
        """Whether there is a vector, not a tensor as it is."""
        return self.members != (self.name,)

    @property
    def sizes(self) -> list[int]:
        """Elements of each member."""
        return [math.prod(s) for s in self.shapes]

    def join(self, op: OpBuilder, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the vector of the members among some values."""
        if not self.joined:
            return values[self.name]
        parts = [op.Reshape(values[n], op.const([-1])) for n in self.members]
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)

    def split(self, op: OpBuilder, vector: ir.Value) -> dict[str, ir.Value]:
        """Emit the members of a vector."""
        if not self.joined:
            return {self.name: vector}
        parts: Sequence[ir.Value] = [vector]
        if len(self.members) > 1:
            parts = op.Split(vector, op.const(self.sizes), axis=0, _outputs=len(self.members))
        return {
            name: op.Reshape(part, op.const(list(shape), ir.DataType.INT64))
            for name, shape, part in zip(self.members, self.shapes, parts, strict=True)
        }

    def join_arrays(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the vector of the members among some arrays, a copy."""
        if not self.joined:
            return np.array(arrays[self.name], self.dtype)
        return np.concatenate([np.ravel(arrays[n]) for n in self.members]).astype(self.dtype)

    def split_array(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return the members of a vector, as views."""
        if not self.joined:
            return {self.name: vector}
        ends = np.cumsum(self.sizes)[:-1]
        return {
            name: part.reshape(shape)
            for name, shape, part in zip(
                self.members, self.shapes, np.split(vector, ends), strict=True
            )
        }


def alike(optimizer: Optimizer, dtypes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return groups of parameters of which every element is updated by the same formula.

    Args:
        optimizer: makes the updates; without ``elementwise`` there are no groups.
        dtypes: the element type of each parameter that may be in a group.
    """
    if not optimizer.elementwise:
        return []
    groups: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for name, dtype in dtypes.items():
        settings = optimizer.group_of(name)
        groups[dtype, settings.weight_decay, settings.lr_factor].append(name)
    return [tuple(names) for names in groups.values()]


__all__ = ["Pack", "alike"]
