"""Adapters put into a graph: their matrices, their branches, their rows in the table."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter
from onnxtrain.adapters.branches import Branches
from onnxtrain.adapters.magnitudes import lengths
from onnxtrain.adapters.modules.layers import CONV, EMBEDDING, Layer
from onnxtrain.adapters.modules.units import Unit
from onnxtrain.adapters.pieces import Piece
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import names_in
from onnxtrain.graph.roles import PARAMETERS


@dataclasses.dataclass(frozen=True)
class Plan:
    """A unit and the adapter that it is to have."""

    unit: Unit
    rank: int
    alpha: float
    rslora: bool
    dora: bool = False

    @property
    def scaling(self) -> float:
        """What the product of both factors is multiplied by; 1 of one that is to be filled."""
        if self.rank == 0:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def names(self) -> tuple[str, str]:
        """What both factors are called in the graph."""
        kind = "lora_embedding_" if self.unit.kind == EMBEDDING else "lora_"
        return f"{self.unit.module}.{kind}A", f"{self.unit.module}.{kind}B"

    @property
    def magnitude(self) -> str | None:
        """What the magnitudes are called in the graph, with DoRA."""
        return f"{self.unit.module}.lora_magnitude" if self.dora else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of both factors in the graph."""
        unit, rank = self.unit, self.rank
        if unit.kind == CONV:
            ones = (1,) * len(unit.kernel)
            rank = rank or unit.groups  # there are no empty kernels: one of zeros is to be filled
            narrow = rank // unit.groups
            return (rank, unit.inputs, *unit.kernel), (unit.outputs, narrow, *ones)
        return (unit.inputs, rank), (rank, unit.outputs)


def check_ranks(plans: Sequence[Plan]) -> None:
    """Refuse a rank that a layer cannot have, naming the layers.

    Raises:
        PrepareError: with the largest rank that all could have.
    """
    small = [p for p in plans if p.rank > p.unit.largest_rank]
    if small:
        listing = ", ".join(
            f"{p.unit.module} ({p.unit.inputs} -> {p.unit.outputs})" for p in small[:4]
        )
        more = f" and {len(small) - 4} more" if len(small) > 4 else ""
        least = min(p.unit.largest_rank for p in small)
        raise PrepareError(
            f"rank {small[0].rank} is larger than a layer: {listing}{more}\n"
            f"hint: rank={least}, or leave these layers out of `targets`"
        )
    tables = [p for p in plans if p.dora and (p.unit.kind == EMBEDDING or p.unit.groups > 1)]
    if tables:
        raise PrepareError(
            f"dora is for linear layers and plain convolutions, not for {tables[0].unit.module}\n"
            "hint: leave it out of `targets`, or dora=False"
        )
    odd = [p for p in plans if p.rank % p.unit.groups]
    if odd:
        unit = odd[0].unit
        raise PrepareError(
            f"rank {odd[0].rank} is no multiple of the {unit.groups} groups of {unit.module}\n"
            "hint: choose another rank, or leave grouped convolutions out of `targets`"
        )


def attach(
    model: ir.Model, plans: Sequence[Plan], start: Mapping[str, np.ndarray], dropout: float
) -> tuple[Adapter, ...]:
    """Put adapters into a model, in place; return the table of them.

    Args:
        model: a model whose layers the plans are about.
        plans: what is wanted.
        start: values of both factors by name.
        dropout: the share of activations that branches do not see in training.
    """
    graph = model.graph
    taken = names_in(graph)
    rows = []
    pieces: dict[Layer, list[Piece]] = collections.defaultdict(list)
    for plan in plans:
        unit = plan.unit
        a, b = (_parameter(graph, n, start[n], unit.dtype, taken) for n in plan.names)
        if plan.rank == 0:  # the size is for those to say who fill it
            a.shape, b.shape = _open_shapes(unit)
        extra: list[ir.Value] = []
        if plan.magnitude is not None:
            squared = lengths(unit) ** 2
            named = {plan.magnitude: start[plan.magnitude], f"{unit.module}.lora_length": squared}
            extra = [_parameter(graph, n, v, unit.dtype, taken) for n, v in named.items()]
        for s in unit.sites:
            place = s.start, s.width, s.column, unit.outputs
            pieces[s.layer].append(Piece(a, b, plan.scaling, plan.rank, *place, *extra))
        rows.append(_row(plan, a, b))
    branches = Branches(graph, dropout)
    for layer, shares in pieces.items():
        branches.add(layer, shares)
    model.metadata_props[PARAMETERS] = json.dumps([n for row in rows for n in row.parameters])
    return tuple(rows)


def _open_shapes(unit: Unit) -> tuple[ir.Shape, ir.Shape]:
    """Return shapes of both factors for any rank."""
    rank = f"lora_rank.{unit.module}"
    if unit.kind != CONV:
        return ir.Shape([unit.inputs, rank]), ir.Shape([rank, unit.outputs])
    narrow = rank if unit.groups == 1 else f"{rank}.group"
    ones = (1,) * len(unit.kernel)
    return ir.Shape([rank, unit.inputs, *unit.kernel]), ir.Shape([unit.outputs, narrow, *ones])


def start_values(plans: Sequence[Plan], seed: int) -> dict[str, np.ndarray]:
    """Return both factors of each adapter as PEFT starts them: their product is zero."""
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for plan in plans:
        (a, b), (narrow, wide) = plan.names, plan.shapes
        if plan.unit.kind == EMBEDDING:
            values[a], values[b] = np.zeros(narrow), rng.standard_normal(wide)
        else:
            fan_in = plan.unit.inputs * math.prod(plan.unit.kernel)
            values[a] = rng.uniform(-1.0, 1.0, narrow) / math.sqrt(fan_in)
            values[b] = np.zeros(wide)
        if plan.magnitude is not None:
            values[plan.magnitude] = lengths(plan.unit)
    return values


def _row(plan: Plan, a: ir.Value, b: ir.Value) -> Adapter:
    unit = plan.unit
    nodes = tuple(s.layer.node.name or "" for s in unit.sites)
    sizes = unit.inputs, unit.outputs, plan.rank, plan.alpha, plan.scaling
    names = a.name or "", b.name or "", plan.magnitude
    return Adapter(unit.module, unit.kind, nodes, *names, *sizes)


def _parameter(
    graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType, taken: set[str]
) -> ir.Value:
    if name in taken:
        raise PrepareError(
            f"the model already has a tensor {name!r}\nhint: it seems to have adapters of its own"
        )
    taken.add(name)
    array = array.astype(dtype.numpy())
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(array, dtype, name=name),
    )
    graph.register_initializer(value)
    return value


__all__ = ["Plan", "attach", "check_ranks", "start_values"]
