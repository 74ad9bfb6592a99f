"""Low-rank adapters beside the frozen layers of a model."""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapted import Adapted, Adapter
from onnxtrain.adapters.branches import Branches, Piece
from onnxtrain.adapters.choose import choose
from onnxtrain.adapters.families import model_type
from onnxtrain.adapters.layers import CONV, EMBEDDING, Layer, layers_of
from onnxtrain.adapters.units import Unit, units_of
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import names_in
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.prepare import show_weights
from onnxtrain.graph.prepare.local_functions import inline_functions
from onnxtrain.graph.prepare.versions import OPSET, to_working_opset
from onnxtrain.graph.roles import PARAMETERS

_OLDEST = 13  # opset from which on the operators of a branch have the form that is emitted
_ROUNDING = 4  # accuracy_level at which MatMulNBits rounds its input


def lora(
    model: Source,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] = "attention",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    *,
    seed: int = 0,
    family: str | None = None,
) -> Adapted:
    """Return the model with trainable low-rank branches beside frozen layers.

    A branch adds ``scaling * (x A) B`` to the output of a layer, where ``A`` and ``B`` are narrow.
    At the start they change nothing. The file and its weights stay as they are.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        rank: how narrow the branches are.
        alpha: the branch is scaled by ``alpha / rank``.
        targets: ``"attention"`` (the projections of attention), ``"all-linear"`` (every linear
            layer but the head), or names or globs of layers, as torch or the file names them.
        dropout: the share of activations that a branch does not see in training.
        rslora: scale by ``alpha / sqrt(rank)`` instead.
        dora: train a magnitude per output beside the direction (DoRA).
        seed: of the drawn start values.
        family: the kind of model as transformers names it (``"phi3"``), where no config.json or
            genai_config.json beside the file tells it. It decides how torch packs its modules.

    Raises:
        PrepareError: if a target matches no layer, or the rank does not fit.
    """
    _check(rank, alpha, dropout, dora)
    path = os.fsdecode(model) if isinstance(model, str | os.PathLike) else None
    family = model_type(path) if family is None else family
    work = _ready(load(model))
    chosen = choose(units_of(layers_of(work.graph), family), targets)
    _check_rank(chosen, rank)
    scaling = alpha / (math.sqrt(rank) if rslora else rank)
    rng = np.random.default_rng(seed)
    taken = names_in(work.graph)
    adapters = []
    pieces: dict[Layer, list[Piece]] = collections.defaultdict(list)
    for unit in chosen:
        a, b = _matrices(work.graph, unit, rank, rng, taken)
        for s in unit.sites:
            place = s.start, s.width, s.column, unit.outputs
            pieces[s.layer].append(Piece(a, b, scaling, rank, *place))
        adapters.append(_row(unit, a, b, rank, float(alpha), scaling))
    branches = Branches(work.graph, dropout)
    for layer, shares in pieces.items():
        branches.add(layer, shares)
    work.metadata_props[PARAMETERS] = json.dumps([n for a in adapters for n in a.parameters])
    return Adapted(
        work, tuple(adapters), rank, float(alpha), dropout, rslora, dora, family, path,
        tuple(_notes(work.graph)),
    )  # fmt: skip


def _row(unit: Unit, a: ir.Value, b: ir.Value, rank: int, alpha: float, scaling: float) -> Adapter:
    nodes = tuple(s.layer.node.name or "" for s in unit.sites)
    sizes = unit.inputs, unit.outputs, rank, alpha, scaling
    return Adapter(unit.module, unit.kind, nodes, a.name or "", b.name or "", None, *sizes)


def _ready(model: ir.Model) -> ir.Model:
    """Return the model with its weights as initializers and types on its values."""
    if model.functions:
        model = inline_functions(model)
    model, _ = show_weights(model)
    if model.opset_imports.get("", OPSET) < _OLDEST:
        model = to_working_opset(model, fused=lambda key: False)
    return model


def _check(rank: int, alpha: float, dropout: float, dora: bool) -> None:
    if rank < 1:
        raise PrepareError(f"rank must be at least 1: {rank}")
    if not alpha > 0 or not math.isfinite(alpha):
        raise PrepareError(f"alpha must be above 0: {alpha}")
    if not 0.0 <= dropout < 1.0:
        raise PrepareError(f"dropout must lie in [0, 1): {dropout}")
    if dora and dropout:
        raise PrepareError("dropout cannot be had together with dora\nhint: dropout=0.0")


def _check_rank(units: Sequence[Unit], rank: int) -> None:
    small = [u for u in units if rank > u.largest_rank]
    if small:
        listing = ", ".join(f"{u.module} ({u.inputs} -> {u.outputs})" for u in small[:4])
        more = f" and {len(small) - 4} more" if len(small) > 4 else ""
        least = min(u.largest_rank for u in small)
        raise PrepareError(
            f"rank {rank} is larger than a layer: {listing}{more}\n"
            f"hint: rank={least}, or leave these layers out of `targets`"
        )


def _matrices(
    graph: ir.Graph, unit: Unit, rank: int, rng: np.random.Generator, taken: set[str]
) -> tuple[ir.Value, ir.Value]:
    """Add both factors to the graph, as PEFT starts them: their product is zero."""
    dtype = _dtype(unit)
    if unit.kind == EMBEDDING:
        a = np.zeros((unit.inputs, rank))
        b = rng.standard_normal((rank, unit.outputs))
        names = "lora_embedding_A", "lora_embedding_B"
    else:
        fan_in = unit.inputs * math.prod(unit.kernel)
        shape = (rank, unit.inputs, *unit.kernel) if unit.kind == CONV else (unit.inputs, rank)
        a = rng.uniform(-1.0, 1.0, shape) / math.sqrt(fan_in)
        ones = (1,) * len(unit.kernel)
        wide = (unit.outputs, rank, *ones) if unit.kind == CONV else (rank, unit.outputs)
        b = np.zeros(wide)
        names = "lora_A", "lora_B"
    first, second = (
        _parameter(graph, f"{unit.module}.{n}", array, dtype, taken)
        for n, array in zip(names, (a, b), strict=True)
    )
    return first, second


def _dtype(unit: Unit) -> ir.DataType:
    """Return the type of the layer's activations."""
    return unit.sites[0].layer.dtype


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


def _notes(graph: ir.Graph) -> list[str]:
    rounding = sum(
        node.op_type == "MatMulNBits" and node.attributes.get_int("accuracy_level", 0) >= _ROUNDING
        for node in graph
    )
    if not rounding:
        return []
    what = f"{rounding} product(s) of the file round their input to 8 bits (accuracy_level 4)"
    return [f"{what}: up to a percent off. Training does not, so the served file differs from it"]


__all__ = ["lora"]
