"""Models without adapters that compute the same: branches folded into the weights.

Quantised layers with other weights: rounded anew, in the form that the file has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.branches import Adapter, AdapterSpec, attach_adapters
from onnxtrain.adapters.layers import (
    CONV,
    EMBEDDING,
    BaseLayer,
    TargetModule,
    find_base_layers,
    find_target_modules,
    find_weight,
    frozen_weight,
    packed_rows,
    weight_values,
)
from onnxtrain.errors import PrepareError
from onnxtrain.graph.nodes import is_op, op_key
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.importer.parameters import PARAMETERS

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Adapted

_NBITS = "com.microsoft::MatMulNBits"
_PACKED = frozenset({_NBITS, "com.microsoft::MatMulBnb4", "com.microsoft::GatherBlockQuantized"})


def is_quantized(layer: BaseLayer) -> bool:
    """Return whether the weights of a layer are stored in few bits."""
    if op_key(layer.node) in _PACKED:
        return True
    weight = find_weight(layer.node.inputs[0 if layer.kind == "embedding" else 1])
    return weight is not None and any(
        x.const_value is not None and not x.const_value.dtype.is_floating_point()
        for x in weight.stored
    )


def can_requantize(layer: BaseLayer) -> bool:
    """Return whether :func:`requantise` knows the form: MatMulNBits without groups of columns."""
    node = layer.node
    if op_key(node) != _NBITS:
        return False
    inputs = [*node.inputs, None, None, None]
    points = inputs[3]
    packed = points is None or (points.dtype == ir.DataType.UINT8)
    own = all(x is None or x.is_initializer() for x in inputs[1:4])
    return inputs[4] is None and packed and own


def requantize(graph: ir.Graph, layer: BaseLayer, weight: np.ndarray) -> None:
    """Let a layer have other weights, [inputs, outputs]: bits, blocks and zero points as before.

    A block whose numbers did not change keeps its scale, so that nothing is rounded twice.
    """
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    blocks = -(-layer.inputs // block)
    rows = np.zeros((layer.outputs, blocks * block), np.float32)
    rows[:, : layer.inputs] = weight.T
    before = packed_rows(node).reshape(layer.outputs, blocks, block)
    wide = rows.reshape(layer.outputs, blocks, block)
    same = (wide == before).all(-1)
    points = node.inputs[3] if len(node.inputs) > 3 else None
    old = weight_values(_input(node, 2)).reshape(layer.outputs, blocks)
    if points is None:
        scales, zero = _symmetric_scales(wide, bits)
        scales = np.where(same, old, scales)
    else:
        scales, zero = _asymmetric_scales(wide, bits)
        keep = _unpack(weight_values(points).reshape(layer.outputs, -1), bits)[:, :blocks]
        scales, zero = np.where(same, old, scales), np.where(same, keep, zero)
    safe = np.where(scales == 0, 1.0, scales)
    codes = np.round(wide / safe[..., None]) + zero[..., None]
    numbers = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
    _replace_tensor(graph, node, 1, _pack(numbers.reshape(layer.outputs, -1), bits))
    _replace_tensor(graph, node, 2, scales)
    if points is not None:
        _replace_tensor(graph, node, 3, _pack(zero.astype(np.uint8), bits))


def _symmetric_scales(wide: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales such that the number largest by amount is the lowest code, as the tools do."""
    middle = 1 << (bits - 1)
    place = np.abs(wide).argmax(-1)
    extreme = np.take_along_axis(wide, place[..., None], -1)[..., 0]
    return extreme / np.float32(-middle), np.full(extreme.shape, middle, np.float32)


def _asymmetric_scales(wide: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points that cover a block from its smallest to its largest number."""
    low, high = np.minimum(wide.min(-1), 0), np.maximum(wide.max(-1), 0)
    top = np.float32((1 << bits) - 1)
    scales = (high - low) / top
    safe = np.where(scales == 0, 1.0, scales)
    return scales, np.clip(np.round(-low / safe), 0, top)


def _pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers of few bits in bytes along the last axis, the first in the lowest bits."""
    per = 8 // bits
    missing = -numbers.shape[-1] % per
    padded = np.pad(numbers, [(0, 0), (0, missing)]).reshape(numbers.shape[0], -1, per)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(padded << shifts, axis=-1).astype(np.uint8)


def _unpack(raw: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(raw.shape[0], -1)


def _input(node: ir.Node, place: int) -> ir.Value:
    x = node.inputs[place]
    assert x is not None
    return x


def _replace_tensor(graph: ir.Graph, node: ir.Node, place: int, array: np.ndarray) -> None:
    """Put other numbers in the place of an initializer, in its shape and type."""
    x = _input(node, place)
    old = x.const_value
    assert old is not None
    shaped = array.astype(old.dtype.numpy()).reshape(old.shape.numpy())
    if len(x.uses()) > 1:  # somebody else reads it as well
        own = graph.initializers.get(f"{x.name}.merged")
        if own is None:
            own = ir.Value(name=f"{x.name}.merged", type=x.type, shape=x.shape)
            graph.register_initializer(_set_tensor(own, shaped, old.dtype))
        node.replace_input_with(place, own)
        return
    _set_tensor(x, shaped, old.dtype)


def _set_tensor(x: ir.Value, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    x.const_value = ir.Tensor(np.ascontiguousarray(array), dtype, name=x.name)
    return x


BRANCH, REQUANTIZE = "branch", "requantise"


@dataclasses.dataclass(frozen=True)
class MergeResult:
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


def merge(adapted: Adapted, values: Mapping[str, np.ndarray], quantised: str) -> MergeResult:
    """Return the model with its adapters folded in, as far as its weights allow."""
    if quantised not in (BRANCH, REQUANTIZE):
        raise PrepareError(f"no such way: {quantised!r}\nhint: {BRANCH} or {REQUANTIZE}")
    model = adapted.plain.clone()
    units = {
        u.module: u for u in find_target_modules(find_base_layers(model.graph), adapted.family)
    }
    folded, rounded, kept = [], [], []
    for a in adapted.adapters:
        unit = units[a.module]
        way = _merge_mode(unit, quantised)
        {"fold": folded, REQUANTIZE: rounded, BRANCH: kept}[way].append(a)
    _check_magnitudes(kept)
    for a in (*folded, *rounded):
        for change in _weight_updates(units[a.module], a, values):
            change.apply(model.graph)
    plans = [AdapterSpec(units[a.module], a.rank, a.alpha, adapted.rslora) for a in kept]
    if plans:
        attach_adapters(model, plans, values, 0.0)
        del model.metadata_props[PARAMETERS]
    remove_dead(model)
    return MergeResult(
        model, *(tuple(a.module for a in group) for group in (folded, rounded, kept))
    )


def _merge_mode(unit: TargetModule, quantised: str) -> str:
    layers = [s.layer for s in unit.sites]
    if unit.groups > 1:
        return BRANCH
    if not any(is_quantized(layer) for layer in layers):
        return "fold"
    able = all(can_requantize(layer) for layer in layers)
    return REQUANTIZE if quantised == REQUANTIZE and able else BRANCH


def _check_magnitudes(kept: Sequence[Adapter]) -> None:
    if any(a.magnitude is not None for a in kept):
        raise PrepareError(
            f"magnitudes cannot stay beside quantised weights: {kept[0].module}\n"
            f"hint: quantised={REQUANTIZE!r}"
        )


@dataclasses.dataclass(frozen=True)
class _WeightUpdate:
    """New weights for some columns of a layer."""

    layer: BaseLayer
    weight: np.ndarray
    """All of the layer's weights, in the layout of :func:`frozen_weight`."""

    def apply(self, graph: ir.Graph) -> None:
        if is_quantized(self.layer):
            requantize(graph, self.layer, self.weight)
        else:
            _store_weight(graph, self.layer, self.weight)


def _weight_updates(
    unit: TargetModule, a: Adapter, values: Mapping[str, np.ndarray]
) -> Iterator[_WeightUpdate]:
    """Yield the new weights of each layer that a unit lies in, each made after the one before."""
    delta = _delta_weight(a, values)
    for site in unit.sites:
        layer = site.layer
        weight = np.array(frozen_weight(layer))
        if layer.kind != CONV and layer.kind != EMBEDDING:
            columns = slice(site.start, site.start + site.width)
            own = slice(site.column, site.column + site.width)
            part = weight[:, columns] + delta[:, own]
            if a.magnitude is not None:
                part = _rescale_to_magnitude(part, values[a.magnitude][own], axis=0)
            weight[:, columns] = part
        else:
            weight = weight + delta
            if a.magnitude is not None:
                axes = tuple(range(1, weight.ndim))
                long = values[a.magnitude].reshape(-1, *(1,) * len(axes))
                weight = _rescale_to_magnitude(weight, long, axis=axes)
        yield _WeightUpdate(layer, weight)


def _delta_weight(a: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what the branch adds to the weights."""
    first, second = values[a.a], values[a.b]
    if a.kind == CONV:
        rank = first.shape[0]
        product = second.reshape(-1, rank) @ first.reshape(rank, -1)
        return np.float32(a.scaling) * product.reshape(-1, *first.shape[1:])
    return np.float32(a.scaling) * (first @ second)


def _rescale_to_magnitude(
    weight: np.ndarray, magnitude: np.ndarray, axis: int | tuple[int, ...]
) -> np.ndarray:
    return weight * (magnitude / np.sqrt((weight**2).sum(axis=axis, keepdims=True)))


def _store_weight(graph: ir.Graph, layer: BaseLayer, weight: np.ndarray) -> None:
    """Let a layer read other weights; whoever shares the old ones keeps them."""
    node, place = layer.node, 0 if layer.kind == EMBEDDING else 1
    if is_op(node, "Gemm"):
        weight = weight / np.float32(node.attributes.get_float("alpha", 1.0))
        weight = weight.T if node.attributes.get_int("transB", 0) else weight
    old = node.inputs[place]
    assert old is not None
    stored, turned = _stored_initializer(old)
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


def _stored_initializer(value: ir.Value) -> tuple[ir.Value | None, bool]:
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
