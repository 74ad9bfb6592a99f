"""Merge adapters into the weights of a model.

``merge`` folds adapters into float weights. Quantized layers keep their weights and get the adapter
as a branch, or ``requantize`` quantizes the merged weights in the format of the file.
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
    """Return whether the weights of a layer are quantized."""
    if op_key(layer.node) in _PACKED:
        return True
    weight = find_weight(layer.node.inputs[0 if layer.kind == "embedding" else 1])
    return weight is not None and any(
        x.const_value is not None and not x.const_value.dtype.is_floating_point()
        for x in weight.stored
    )


def can_requantize(layer: BaseLayer) -> bool:
    """Return whether :func:`requantize` supports a layer: MatMulNBits without ``g_idx``."""
    node = layer.node
    if op_key(node) != _NBITS:
        return False
    inputs = [*node.inputs, None, None, None]
    zero_points, g_idx = inputs[3], inputs[4]
    packed = zero_points is None or zero_points.dtype == ir.DataType.UINT8
    stored = all(x is None or x.is_initializer() for x in inputs[1:4])
    return g_idx is None and packed and stored


def requantize(graph: ir.Graph, layer: BaseLayer, weight: np.ndarray) -> None:
    """Replace the weight of a layer, ``[inputs, outputs]``; bits and block size do not change.

    A block whose values did not change keeps its scale and zero point: it is not rounded again.
    """
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    blocks = -(-layer.inputs // block)
    rows = np.zeros((layer.outputs, blocks * block), np.float32)
    rows[:, : layer.inputs] = weight.T
    before = packed_rows(node).reshape(layer.outputs, blocks, block)
    values = rows.reshape(layer.outputs, blocks, block)
    unchanged = (values == before).all(-1)
    zero_points = node.inputs[3] if len(node.inputs) > 3 else None
    old_scales = weight_values(_input(node, 2)).reshape(layer.outputs, blocks)
    if zero_points is None:
        scales, zeros = _symmetric_scales(values, bits)
        scales = np.where(unchanged, old_scales, scales)
    else:
        scales, zeros = _asymmetric_scales(values, bits)
        old_zeros = _unpack(weight_values(zero_points).reshape(layer.outputs, -1), bits)
        scales = np.where(unchanged, old_scales, scales)
        zeros = np.where(unchanged, old_zeros[:, :blocks], zeros)
    divisors = np.where(scales == 0, 1.0, scales)
    codes = np.round(values / divisors[..., None]) + zeros[..., None]
    codes = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
    _replace_tensor(graph, node, 1, _pack(codes.reshape(layer.outputs, -1), bits))
    _replace_tensor(graph, node, 2, scales)
    if zero_points is not None:
        _replace_tensor(graph, node, 3, _pack(zeros.astype(np.uint8), bits))


def shift_zero_points(graph: ir.Graph, layer: BaseLayer, rows: slice, delta: np.ndarray) -> None:
    """Add a number to all weights of each block, ``[outputs, blocks]``, exactly.

    ``(q - z) s + d = (q - (z - d / s)) s``: MatMulNBits accepts zero points that are no integers.
    """
    node = layer.node
    bits = node.attributes.get_int("bits", 4)
    scales = weight_values(_input(node, 2)).reshape(layer.outputs, -1).astype(np.float32)
    given = node.inputs[3] if len(node.inputs) > 3 else None
    if given is None:
        zeros = np.full(scales.shape, 1 << (bits - 1), np.float32)
    else:
        raw = weight_values(given).reshape(layer.outputs, -1)
        packed = given.dtype == ir.DataType.UINT8
        zeros = (_unpack(raw, bits) if packed else raw)[:, : scales.shape[1]].astype(np.float32)
    if (scales[rows] == 0).any():
        raise PrepareError(
            f"{layer.module}: a block of zeros has no zero point to move\n"
            "hint: lora(..., blocks=False)"
        )
    zeros[rows] -= delta / scales[rows]
    name = f"{layer.module}.zero_points"
    array = zeros.reshape(-1).astype(layer.dtype.numpy())
    value = graph.initializers.get(name)
    if value is None:
        value = ir.Value(name=name, type=ir.TensorType(layer.dtype), shape=ir.Shape(array.shape))
        graph.register_initializer(_set_tensor(value, array, layer.dtype))
    else:
        _set_tensor(value, array, layer.dtype)
    node.resize_inputs(max(4, len(node.inputs)))
    node.replace_input_with(3, value)


def _symmetric_scales(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales that map the value of largest magnitude to code 0, as onnxruntime's tools do.

    Codes are unsigned, so code 0 is the most negative level, which has no positive counterpart.
    """
    middle = 1 << (bits - 1)
    index = np.abs(values).argmax(-1)
    extreme = np.take_along_axis(values, index[..., None], -1)[..., 0]
    return extreme / np.float32(-middle), np.full(extreme.shape, middle, np.float32)


def _asymmetric_scales(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points that map the range of each block to all codes."""
    low, high = np.minimum(values.min(-1), 0), np.maximum(values.max(-1), 0)
    max_code = np.float32((1 << bits) - 1)
    scales = (high - low) / max_code
    divisors = np.where(scales == 0, 1.0, scales)
    return scales, np.clip(np.round(-low / divisors), 0, max_code)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes into bytes along the last axis, the first code in the lowest bits."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    padded = np.pad(codes, [(0, 0), (0, missing)]).reshape(codes.shape[0], -1, per_byte)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(padded << shifts, axis=-1).astype(np.uint8)


def _unpack(raw: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(raw.shape[0], -1)


def _input(node: ir.Node, index: int) -> ir.Value:
    x = node.inputs[index]
    assert x is not None
    return x


def _replace_tensor(graph: ir.Graph, node: ir.Node, index: int, array: np.ndarray) -> None:
    """Replace the values of an initializer; other nodes that read it keep the old ones."""
    x = _input(node, index)
    old = x.const_value
    assert old is not None
    shaped = array.astype(old.dtype.numpy()).reshape(old.shape.numpy())
    if len(x.uses()) > 1:
        copy = graph.initializers.get(f"{x.name}.merged")
        if copy is None:
            copy = ir.Value(name=f"{x.name}.merged", type=x.type, shape=x.shape)
            graph.register_initializer(_set_tensor(copy, shaped, old.dtype))
        node.replace_input_with(index, copy)
        return
    _set_tensor(x, shaped, old.dtype)


def _set_tensor(x: ir.Value, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    x.const_value = ir.Tensor(np.ascontiguousarray(array), dtype, name=x.name)
    return x


BRANCH, REQUANTIZE = "branch", "requantize"
_SHIFT = "shift"


@dataclasses.dataclass(frozen=True)
class MergeResult:
    """A merged model, and how each adapter was merged."""

    model: ir.Model
    folded: tuple[str, ...]
    """Modules with an adapter folded into float weights."""
    requantized: tuple[str, ...]
    """Modules whose merged weights were quantized again."""
    branches: tuple[str, ...]
    """Modules that keep their quantized weights; the adapter is a branch of the graph."""
    shifted: tuple[str, ...] = ()
    """Modules with an adapter merged into the zero points of quantized weights."""

    def __str__(self) -> str:
        counts = [
            (len(self.folded), "folded into float weights"),
            (len(self.requantized), "requantized"),
            (len(self.shifted), "merged into zero points"),
            (len(self.branches), "kept as branches of quantized layers"),
        ]
        return "adapters: " + ", ".join(f"{n} {what}" for n, what in counts if n)


def merge(adapted: Adapted, values: Mapping[str, np.ndarray], quantized: str) -> MergeResult:
    """Return the model with its adapters merged."""
    if quantized not in (BRANCH, REQUANTIZE):
        raise PrepareError(
            f"unknown option for quantized: {quantized!r} (expected {BRANCH!r} or {REQUANTIZE!r})"
        )
    model = adapted.plain.clone()
    candidates = {
        u.module: u for u in find_target_modules(find_base_layers(model.graph), adapted.family)
    }
    folded, requantized, branches, shifted = [], [], [], []
    by_mode = {"fold": folded, REQUANTIZE: requantized, BRANCH: branches, _SHIFT: shifted}
    for a in adapted.adapters:
        mode = _SHIFT if a.block else _merge_mode(candidates[a.module], quantized)
        by_mode[mode].append(a)
    _check_magnitudes(branches)
    for a in (*folded, *requantized):
        for update in _weight_updates(candidates[a.module], a, values):
            update.apply(model.graph)
    for a in shifted:
        delta = _delta_weight(a, values)[:: a.block]
        for s in candidates[a.module].slices:
            columns = slice(s.start, s.start + s.width)
            own = delta[:, s.column : s.column + s.width]
            shift_zero_points(model.graph, s.layer, columns, own.T)
    specs = [AdapterSpec(candidates[a.module], a.rank, a.alpha, adapted.rslora) for a in branches]
    if specs:
        attach_adapters(model, specs, values, 0.0)
        del model.metadata_props[PARAMETERS]
    remove_dead(model)
    return MergeResult(
        model,
        *(tuple(a.module for a in group) for group in (folded, requantized, branches, shifted)),
    )


def _merge_mode(target: TargetModule, quantized: str) -> str:
    layers = [s.layer for s in target.slices]
    if target.groups > 1:
        return BRANCH
    if not any(is_quantized(layer) for layer in layers):
        return "fold"
    supported = all(can_requantize(layer) for layer in layers)
    return REQUANTIZE if quantized == REQUANTIZE and supported else BRANCH


def _check_magnitudes(branches: Sequence[Adapter]) -> None:
    if any(a.magnitude is not None for a in branches):
        raise PrepareError(
            f"cannot keep DoRA as a branch of a quantized layer: {branches[0].module}\n"
            f"hint: quantized={REQUANTIZE!r}"
        )


@dataclasses.dataclass(frozen=True)
class _WeightUpdate:
    """The merged weight of a layer, in the layout of :func:`frozen_weight`."""

    layer: BaseLayer
    weight: np.ndarray

    def apply(self, graph: ir.Graph) -> None:
        if is_quantized(self.layer):
            requantize(graph, self.layer, self.weight)
        else:
            _store_weight(graph, self.layer, self.weight)


def _weight_updates(
    target: TargetModule, a: Adapter, values: Mapping[str, np.ndarray]
) -> Iterator[_WeightUpdate]:
    """Yield the merged weight of each layer that computes a module.

    Lazy: two slices may be of the same layer, and the second update starts from the first.
    """
    delta = _delta_weight(a, values)
    for s in target.slices:
        layer = s.layer
        weight = np.array(frozen_weight(layer))
        if layer.kind != CONV and layer.kind != EMBEDDING:
            columns = slice(s.start, s.start + s.width)
            own = slice(s.column, s.column + s.width)
            part = weight[:, columns] + delta[:, own]
            if a.magnitude is not None:
                part = _rescale_to_magnitude(part, values[a.magnitude][own], axis=0)
            weight[:, columns] = part
        else:
            weight = weight + delta
            if a.magnitude is not None:
                axes = tuple(range(1, weight.ndim))
                magnitude = values[a.magnitude].reshape(-1, *(1,) * len(axes))
                weight = _rescale_to_magnitude(weight, magnitude, axis=axes)
        yield _WeightUpdate(layer, weight)


def _delta_weight(a: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return ``scaling * A B`` in the layout of the weight."""
    lora_a, lora_b = values[a.a], values[a.b]
    if a.kind == CONV:
        rank = lora_a.shape[0]
        product = lora_b.reshape(-1, rank) @ lora_a.reshape(rank, -1)
        return np.float32(a.scaling) * product.reshape(-1, *lora_a.shape[1:])
    return np.float32(a.scaling) * (lora_a @ lora_b)


def _rescale_to_magnitude(
    weight: np.ndarray, magnitude: np.ndarray, axis: int | tuple[int, ...]
) -> np.ndarray:
    return weight * (magnitude / np.sqrt((weight**2).sum(axis=axis, keepdims=True)))


def _store_weight(graph: ir.Graph, layer: BaseLayer, weight: np.ndarray) -> None:
    """Replace the float weight of a layer; other layers that share it keep the old one."""
    node, index = layer.node, 0 if layer.kind == EMBEDDING else 1
    if is_op(node, "Gemm"):
        weight = weight / np.float32(node.attributes.get_float("alpha", 1.0))
        weight = weight.T if node.attributes.get_int("transB", 0) else weight
    old = node.inputs[index]
    assert old is not None
    stored, transposed = _stored_initializer(old)
    dtype = old.dtype or layer.dtype
    if stored is not None and len(stored.uses()) == 1:
        array = np.ascontiguousarray(weight.T if transposed else weight).astype(dtype.numpy())
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
    node.replace_input_with(index, value)


def _stored_initializer(value: ir.Value) -> tuple[ir.Value | None, bool]:
    """Return the initializer behind a value, and whether a Transpose is between them."""
    if value.is_initializer():
        return value, False
    node = value.producer()
    if node is None or not is_op(node, "Transpose") or len(value.uses()) != 1:
        return None, False
    x = node.inputs[0]
    return (x, True) if x is not None and x.is_initializer() and _is_matrix(x) else (None, False)


def _is_matrix(x: ir.Value) -> bool:
    return x.const_value is not None and len(x.const_value.shape.numpy()) == 2
