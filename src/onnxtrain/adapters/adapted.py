"""A model with adapters: frozen weights as they were, and small matrices that train."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One pair of matrices beside a frozen layer."""

    module: str
    """The path of the torch module, as PEFT files name it."""
    kind: str
    """``linear``, ``embedding`` or ``conv``."""
    nodes: tuple[str, ...]
    """Names of the nodes that the branch stands beside."""
    a: str
    """The initializer of the first factor: [inputs, rank]; of a convolution, its kernel."""
    b: str
    """The initializer of the second factor: [rank, outputs]; of a convolution, its kernel."""
    magnitude: str | None
    """The initializer of the magnitudes, with DoRA."""
    inputs: int
    outputs: int
    rank: int
    alpha: float
    scaling: float
    """What the product of both factors is multiplied by."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all initializers that train."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def __str__(self) -> str:
        sizes = f"{self.kind} {self.inputs} -> {self.outputs}"
        return f"{self.module}: {sizes}, rank {self.rank}, scaling {self.scaling:g}"


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model with adapters: :func:`onnxtrain.build` and all else take it as a model.

    Only the adapters train. The weights of the file are not copied: they stay mapped.
    """

    model: ir.Model
    """The graph with its branches; initializers of the file keep their names and bytes."""
    adapters: tuple[Adapter, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    family: str | None
    """The kind of model, as transformers names it, if it is known."""
    base: str | None
    """The file that the model came from, if it is one."""
    notes: tuple[str, ...] = ()
    """What a user should know before training."""

    def as_ir(self) -> ir.Model:
        """Return the model, for whatever takes models."""
        return self.model

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The adapters' tensors by name, as they are in the model."""
        known = self.model.graph.initializers
        arrays: dict[str, np.ndarray] = {}
        for name in self.names:
            tensor = known[name].const_value
            assert tensor is not None
            arrays[name] = tensor.numpy()
        return arrays

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all initializers that train, each once."""
        return tuple(dict.fromkeys(n for a in self.adapters for n in a.parameters))

    @property
    def size(self) -> int:
        """How many numbers train."""
        return sum(a.size for a in self.parameters.values())

    def with_parameters(self, arrays: Mapping[str, np.ndarray]) -> Adapted:
        """Return the same model with other values of its adapters."""
        model = self.model.clone()
        model.meta.update(self.model.meta)
        for name, array in arrays.items():
            x = model.graph.initializers[name]
            assert x.const_value is not None
            dtype = x.const_value.dtype
            x.const_value = ir.Tensor(np.asarray(array).astype(dtype.numpy()), dtype, name=name)
        return dataclasses.replace(self, model=model)

    def __str__(self) -> str:
        kinds = "DoRA" if self.dora else "LoRA"
        where = "" if self.base is None else f" on {os.path.basename(self.base)}"
        count = f"{len(self.adapters)} adapters, {self.size:,} parameters"
        lines = [f"{kinds} rank {self.rank}{where}: {count}", *(f"  {a}" for a in self.adapters)]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


__all__ = ["Adapted", "Adapter"]
