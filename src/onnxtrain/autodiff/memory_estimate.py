"""How much memory training would take, estimated before anything is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

# These give their input another shape and need no memory of their own.
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by what they hold; an estimate from shapes, not a measurement."""

    parameters: int
    gradients: int
    adam_state: int
    """Two numbers for each one of a parameter; plain gradient descent needs none."""
    activations: int
    """Everything the forward pass computes, as if all of it were kept for the backward pass."""
    sizes: dict[str, int]
    """What was taken for symbolic sizes: one, unless the caller has said more."""
    unknown: int
    """How many values have a size that cannot be told; they count as nothing."""

    @property
    def total(self) -> int:
        """Everything, with Adam."""
        return self.parameters + self.gradients + self.adam_state + self.activations

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} = {v}" for n, v in self.sizes.items())
        return (
            f"about {_text(self.total)} to train with Adam"
            f"{f' at {sizes}' if sizes else ''}: parameters {_text(self.parameters)}, "
            f"gradients {_text(self.gradients)}, state {_text(self.adam_state)}, "
            f"activations at most {_text(self.activations)}"
            f"{f' and {self.unknown} value(s) of unknown size' if self.unknown else ''}"
        )


def estimate(
    graph: ir.Graph, trained: Iterable[ir.Value], sizes: Mapping[str, int] | None = None
) -> Memory:
    """Return the memory that training some parameters of a prepared graph takes.

    Args:
        graph: the forward pass, with shapes inferred.
        trained: the parameters.
        sizes: numbers for symbolic sizes; others count as one.
    """
    given = {D.symbol(n): v for n, v in (sizes or {}).items()}
    symbols = {s for x in graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    chosen: dict[str, Dim] = {s: given.get(s, 1) for s in sorted(symbols)}
    parameters = sum(_bytes(x, chosen) or 0 for x in trained)
    activation_bytes = [
        _bytes(y, chosen) for node in graph if node.op_type not in _VIEWS for y in node.outputs
    ]
    return Memory(
        parameters=parameters,
        gradients=parameters,
        adam_state=2 * parameters,
        activations=sum(b for b in activation_bytes if b is not None),
        sizes={n: int(v or 1) for n, v in chosen.items()},
        unknown=sum(b is None for b in activation_bytes),
    )


def _bytes(x: ir.Value, sizes: Mapping[str, Dim]) -> int | None:
    dims = S.dims_of(x)
    if dims is None or isinstance(x.type, ir.SequenceType | ir.OptionalType):
        return None
    if x.dtype is None or x.dtype == ir.DataType.STRING:
        return None
    known = [D.substitute(d, dict(sizes)) for d in dims]
    numbers = [d for d in known if isinstance(d, int)]
    if len(numbers) != len(known):
        return None
    return math.ceil(math.prod(numbers) * x.dtype.bitwidth / 8)


def _text(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # pyright: ignore[reportAssignmentType]
    return f"{count:.3g} GB"
