"""Models without adapters that compute the same: branches folded into the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter
from onnxtrain.adapters.attach import Plan, attach
from onnxtrain.adapters.files.requantise import can_requantise, is_quantised, requantise
from onnxtrain.adapters.modules.frozen_weights import frozen_weight
from onnxtrain.adapters.modules.layers import CONV, EMBEDDING, Layer, layers_of
from onnxtrain.adapters.modules.units import Unit, units_of
from onnxtrain.errors import PrepareError
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.roles import PARAMETERS
from onnxtrain.graph.simplify import remove_dead

if TYPE_CHECKING:
    from onnxtrain.adapters.adapted import Adapted

BRANCH, REQUANTISE = "branch", "requantise"


@dataclasses.dataclass(frozen=True)
class Merged:
    """A model without adapters, and what became of each."""

    model: ir.Model
    folded: tuple[str, ...]
    """Modules whose float weights changed."""
    requantised: tuple[str, ...]
    """Modules whose quantised weights were rounded again."""
    branches: tuple[str, ...]
    """Modules that keep their weights and have the branch beside them."""

    def __str__(self) -> str:
        counts = [
            (len(self.folded), "folded into float weights"),
            (len(self.requantised), "rounded again"),
            (len(self.branches), "kept as a branch beside quantised weights"),
        ]
        return "adapters: " + ", ".join(f"{n} {what}" for n, what in counts if n)


def merge(adapted: Adapted, values: Mapping[str, np.ndarray], quantised: str) -> Merged:
    """Return the model with its adapters folded in, as far as its weights allow."""
    if quantised not in (BRANCH, REQUANTISE):
        raise PrepareError(f"no such way: {quantised!r}\nhint: {BRANCH} or {REQUANTISE}")
    model = adapted.plain.clone()
    model.meta.update(adapted.plain.meta)
    units = {u.module: u for u in units_of(layers_of(model.graph), adapted.family)}
    folded, rounded, kept = [], [], []
    for a in adapted.adapters:
        unit = units[a.module]
        way = _way(unit, quantised)
        {"fold": folded, REQUANTISE: rounded, BRANCH: kept}[way].append(a)
    _check_magnitudes(kept)
    for a in (*folded, *rounded):
        for change in _changes(units[a.module], a, values):
            change.apply(model.graph)
    plans = [Plan(units[a.module], a.rank, a.alpha, adapted.rslora) for a in kept]
    if plans:
        attach(model, plans, values, 0.0)
        del model.metadata_props[PARAMETERS]
    remove_dead(model)
    return Merged(model, *(tuple(a.module for a in group) for group in (folded, rounded, kept)))


def _way(unit: Unit, quantised: str) -> str:
    layers = [s.layer for s in unit.sites]
    if unit.groups > 1:
        return BRANCH
    if not any(is_quantised(layer) for layer in layers):
        return "fold"
    able = all(can_requantise(layer) for layer in layers)
    return REQUANTISE if quantised == REQUANTISE and able else BRANCH


def _check_magnitudes(kept: Sequence[Adapter]) -> None:
    if any(a.magnitude is not None for a in kept):
        raise PrepareError(
            f"magnitudes cannot stay beside quantised weights: {kept[0].module}\n"
            f"hint: quantised={REQUANTISE!r}"
        )


@dataclasses.dataclass(frozen=True)
class _Change:
    """New weights for some columns of a layer."""

    layer: Layer
    weight: np.ndarray
    """All of the layer's weights, in the layout of :func:`frozen_weight`."""

    def apply(self, graph: ir.Graph) -> None:
        if is_quantised(self.layer):
            requantise(graph, self.layer, self.weight)
        else:
            _store(graph, self.layer, self.weight)


def _changes(unit: Unit, a: Adapter, values: Mapping[str, np.ndarray]) -> Iterator[_Change]:
    """Yield the new weights of each layer that a unit lies in, each made after the one before."""
    delta = _delta(a, values)
    for site in unit.sites:
        layer = site.layer
        weight = np.array(frozen_weight(layer))
        if layer.kind != CONV and layer.kind != EMBEDDING:
            columns = slice(site.start, site.start + site.width)
            own = slice(site.column, site.column + site.width)
            part = weight[:, columns] + delta[:, own]
            if a.magnitude is not None:
                part = _with_length(part, values[a.magnitude][own], axis=0)
            weight[:, columns] = part
        else:
            weight = weight + delta
            if a.magnitude is not None:
                axes = tuple(range(1, weight.ndim))
                long = values[a.magnitude].reshape(-1, *(1,) * len(axes))
                weight = _with_length(weight, long, axis=axes)
        yield _Change(layer, weight)


def _delta(a: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what the branch adds to the weights."""
    first, second = values[a.a], values[a.b]
    if a.kind == CONV:
        rank = first.shape[0]
        product = second.reshape(-1, rank) @ first.reshape(rank, -1)
        return np.float32(a.scaling) * product.reshape(-1, *first.shape[1:])
    return np.float32(a.scaling) * (first @ second)


def _with_length(
    weight: np.ndarray, magnitude: np.ndarray, axis: int | tuple[int, ...]
) -> np.ndarray:
    return weight * (magnitude / np.sqrt((weight**2).sum(axis=axis, keepdims=True)))


def _store(graph: ir.Graph, layer: Layer, weight: np.ndarray) -> None:
    """Let a layer read other weights; whoever shares the old ones keeps them."""
    node, place = layer.node, 0 if layer.kind == EMBEDDING else 1
    if is_op(node, "Gemm"):
        weight = weight / np.float32(node.attributes.get_float("alpha", 1.0))
        weight = weight.T if node.attributes.get_int("transB", 0) else weight
    old = node.inputs[place]
    assert old is not None
    stored, turned = _behind(old)
    dtype = old.dtype or layer.dtype
    if stored is not None and len(stored.uses()) == 1:
        array = np.ascontiguousarray(weight.T if turned else weight).astype(dtype.numpy())
        stored.const_value = ir.Tensor(array, dtype, name=stored.name)
        return
    array = np.ascontiguousarray(weight).astype(dtype.numpy())
    name = f"{layer.module}.merged"
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(array, dtype, name=name),
    )
    if name in graph.initializers:
        value = graph.initializers[name]
        value.const_value = ir.Tensor(array, dtype, name=name)
    else:
        graph.register_initializer(value)
    node.replace_input_with(place, value)


def _behind(value: ir.Value) -> tuple[ir.Value | None, bool]:
    """Return the initializer that a value is, or that it is the transposed of."""
    if value.is_initializer():
        return value, False
    node = value.producer()
    if node is None or not is_op(node, "Transpose") or len(value.uses()) != 1:
        return None, False
    x = node.inputs[0]
    return (x, True) if x is not None and x.is_initializer() and _is_matrix(x) else (None, False)


def _is_matrix(x: ir.Value) -> bool:
    return x.const_value is not None and len(x.const_value.shape.numpy()) == 2


__all__ = ["BRANCH", "REQUANTISE", "Merged", "merge"]
