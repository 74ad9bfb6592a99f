"""Find the layers of a graph that can have an adapter, and the torch modules they implement.

In this order:

    find_weight          the initializers behind an input of a MatMul, Gemm, Conv or Gather
    find_base_layers     the nodes with frozen weights, as ``BaseLayer``
    find_target_modules  the torch modules they implement, as ``TargetModule``
    select_targets       the modules that ``targets=`` selects
    frozen_weight        the weights of a layer as float32, dequantized

A layer is not always one module. Exporters join the query, key and value projections into one
MatMul, or split a packed torch module (Phi-3: ``qkv_proj``) into several. PEFT has one adapter per
torch module, so adapters belong to modules, and each module knows its columns in every layer.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.families import (
    PACKED,
    is_genai_builder,
    module_name,
    transformers_name,
    weight_module,
)
from onnxtrain.errors import PrepareError
from onnxtrain.expand.quantized import BNB4, PackedFormat
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, op_key

_SHAPE_PRESERVING_OPS = ("DequantizeLinear", "Cast", "Identity")


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """A frozen weight: the value that a node reads, and the initializers it is computed from."""

    value: ir.Value
    shape: tuple[int, ...]
    stored: tuple[ir.Value, ...]
    """The initializers, in order; several if they are concatenated."""
    joined: tuple[tuple[ir.Value, int], ...] = ()
    """The initializers concatenated along the output axis, each with its width."""


def find_weight(value: ir.Value | None, outputs_axis: int = 1) -> WeightSource | None:
    """Return the weight behind a value; ``None`` if anything but initializers is involved.

    Args:
        value: an input of a layer.
        outputs_axis: its axis of output features.
    """
    if value is None:
        return None
    tensor = value.const_value
    if tensor is not None and value.is_initializer():
        return WeightSource(value, tuple(int(d) for d in tensor.shape.numpy()), (value,))
    node = value.producer()
    if node is None or not node.inputs:
        return None
    if is_op(node, *_SHAPE_PRESERVING_OPS):
        inner = find_weight(node.inputs[0], outputs_axis)
        return None if inner is None else dataclasses.replace(inner, value=value)
    if is_op(node, "Transpose"):
        return _transposed(value, node, outputs_axis)
    if is_op(node, "Concat"):
        return _concatenated(value, node, outputs_axis)
    return None


def _transposed(value: ir.Value, node: ir.Node, outputs_axis: int) -> WeightSource | None:
    perm = node.attributes.get_ints("perm")
    axis = perm[outputs_axis] if perm else -1 - outputs_axis
    inner = find_weight(node.inputs[0], axis % 2 if perm is None else axis)
    if inner is None:
        return None
    order = perm or tuple(reversed(range(len(inner.shape))))
    return dataclasses.replace(inner, value=value, shape=tuple(inner.shape[i] for i in order))


def _concatenated(value: ir.Value, node: ir.Node, outputs_axis: int) -> WeightSource | None:
    parts = [find_weight(x, outputs_axis) for x in node.inputs]
    whole = [p for p in parts if p is not None]
    if len(whole) != len(parts):
        return None
    axis = node.attributes.get_int("axis", 0) % len(whole[0].shape)
    shape = list(whole[0].shape)
    shape[axis] = sum(p.shape[axis] for p in whole)
    stored = tuple(x for p in whole for x in p.stored)
    joined: tuple[tuple[ir.Value, int], ...] = ()
    if axis == outputs_axis and all(len(p.stored) == 1 for p in whole):
        joined = tuple((p.stored[0], p.shape[axis]) for p in whole)
    return WeightSource(value, tuple(shape), stored, joined)


def weight_values(value: ir.Value) -> np.ndarray:
    """Return the values of a weight; evaluates the operators between it and the initializers."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    assert node is not None
    inputs = [weight_values(x) for x in _inputs(node)]
    if is_op(node, "Transpose"):
        return inputs[0].transpose(node.attributes.get_ints("perm"))
    if is_op(node, "Concat"):
        return np.concatenate(inputs, axis=node.attributes.get_int("axis", 0))
    if is_op(node, "Cast"):
        return inputs[0].astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if is_op(node, "DequantizeLinear"):
        return _dequantize(node, inputs)
    return inputs[0]


def _inputs(node: ir.Node) -> Iterator[ir.Value]:
    return (x for x in node.inputs if x is not None)


def _dequantize(node: ir.Node, inputs: list[np.ndarray]) -> np.ndarray:
    codes, scale = inputs[0].astype(np.float32), inputs[1].astype(np.float32)
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    zero_point = inputs[2].astype(np.float32) if len(inputs) > 2 else np.zeros_like(scale)
    if block:
        size = codes.shape[axis]
        scale, zero_point = (
            np.repeat(a, block, axis=axis).take(range(size), axis=axis) for a in (scale, zero_point)
        )
    elif scale.ndim == 1 and scale.size > 1:
        sizes = [1] * codes.ndim
        sizes[axis] = -1
        scale, zero_point = scale.reshape(sizes), zero_point.reshape(sizes)
    return (codes - zero_point) * scale


LINEAR, EMBEDDING, CONV = "linear", "embedding", "conv"
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class BaseLayer:
    """A node with frozen weights, and the torch modules side by side in its output."""

    node: ir.Node
    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    module: str
    modules: tuple[tuple[str, int], ...]
    """Name and output features of each module; one entry unless the layer is packed."""
    kernel: tuple[int, ...] = ()
    """The kernel size of a convolution."""
    groups: int = 1

    @property
    def x(self) -> ir.Value:
        """The input of the layer: activations, or the indices of an embedding."""
        x = self.node.inputs[1 if self.kind == EMBEDDING else 0]
        assert x is not None
        return x

    @property
    def dtype(self) -> ir.DataType:
        """The float type of the output; float32 if the graph has no type."""
        scales = self.node.inputs[2:3] if self.node.domain else []
        for value in (self.y, self.x, *self.node.inputs[:2], *scales, *self.weights):
            dtype = None if value is None else value.dtype
            if dtype is not None and dtype in S.FLOATS:
                return dtype
        return ir.DataType.FLOAT

    @property
    def y(self) -> ir.Value:
        """The output of the layer."""
        return self.node.outputs[0]


@dataclasses.dataclass(frozen=True)
class _LayerInfo:
    """What the attributes and weights of a node say; ``BaseLayer`` adds the module names."""

    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    joined: tuple[tuple[ir.Value, int], ...] = ()
    kernel: tuple[int, ...] = ()
    groups: int = 1


def find_base_layers(graph: ir.Graph) -> list[BaseLayer]:
    """Return every layer of the graph that can have an adapter, in graph order."""
    layers = []
    for node in graph:
        read = _READERS.get(op_key(node))
        info = None if read is None else read(node)
        if info is not None:
            layers.append(_base_layer(node, info))
    return layers


def _base_layer(node: ir.Node, info: _LayerInfo) -> BaseLayer:
    module = module_name(node, info.weights, shared=_is_tied_embedding(info))
    return BaseLayer(
        node,
        info.kind,
        info.inputs,
        info.outputs,
        info.weights,
        module,
        _packed_modules(node, module, info),
        info.kernel,
        info.groups,
    )


def _is_tied_embedding(info: _LayerInfo) -> bool:
    """Return whether a linear layer shares its weight with an embedding."""
    return info.kind == LINEAR and any(
        use.node.op_type in ("Gather", "GatherBlockQuantized") for use in info.weights[0].uses()
    )


def _packed_modules(node: ir.Node, module: str, info: _LayerInfo) -> tuple[tuple[str, int], ...]:
    """Return name and output features of each module in the output of a layer."""
    if info.joined:
        return tuple((weight_module(weight), width) for weight, width in info.joined)
    whole = ((module, info.outputs),)
    stem, _, last = module.rpartition(".")
    if info.kind != LINEAR or last != "qkv_proj" or not is_genai_builder(info.weights):
        return whole
    widths = _packed_widths(node.outputs[0])
    if widths is None or sum(widths) != info.outputs:
        return whole
    return tuple((f"{stem}.{name}", width) for name, width in zip(_QKV, widths, strict=True))


def _packed_widths(y: ir.Value) -> tuple[int, int, int] | None:
    """Return the widths of queries, keys and values, from the node that separates them."""
    for use in y.uses():
        node = use.node
        if is_op(node, "Add", "Cast"):
            widths = _packed_widths(node.outputs[0])
            if widths is not None:
                return widths
        if node.op_type in ("GroupQueryAttention", "SparseAttention") and use.idx == 0:
            return _by_heads(node, y)
        if is_op(node, "Split") and len(node.outputs) == 3:
            sizes = _constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
            if sizes is not None and len(sizes) == 3:
                return sizes[0], sizes[1], sizes[2]
    return None


def _constant_ints(value: ir.Value | None) -> list[int] | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(n) for n in tensor.numpy().reshape(-1)]


def _by_heads(node: ir.Node, y: ir.Value) -> tuple[int, int, int] | None:
    queries = node.attributes.get_int("num_heads", 0)
    keys = node.attributes.get_int("kv_num_heads", 0)
    dims = S.dims_of(y)
    width = dims[-1] if dims else None
    if not isinstance(width, int):
        width = _producer_width(y)
    if not queries or not keys or not isinstance(width, int) or width % (queries + 2 * keys):
        return None
    head = width // (queries + 2 * keys)
    return queries * head, keys * head, keys * head


def _producer_width(y: ir.Value) -> int | None:
    """Return the output features of the layer that produces a value, with or without a bias."""
    node = y.producer()
    while node is not None and is_op(node, "Add", "Cast"):
        first = node.inputs[0]
        node = None if first is None else first.producer()
    read = None if node is None else _READERS.get(op_key(node))
    info = None if read is None or node is None else read(node)
    return None if info is None else info.outputs


def _matmul(node: ir.Node) -> _LayerInfo | None:
    weight = find_weight(node.inputs[1])
    if weight is None or len(weight.shape) != 2 or find_weight(node.inputs[0]) is not None:
        return None
    k, n = weight.shape
    return _LayerInfo(LINEAR, k, n, weight.stored, weight.joined)


def _gemm(node: ir.Node) -> _LayerInfo | None:
    if node.attributes.get_int("transA", 0) or find_weight(node.inputs[0]) is not None:
        return None
    transposed = node.attributes.get_int("transB", 0)
    weight = find_weight(node.inputs[1], 0 if transposed else 1)
    if weight is None or len(weight.shape) != 2:
        return None
    k, n = reversed(weight.shape) if transposed else weight.shape
    return _LayerInfo(LINEAR, k, n, weight.stored, weight.joined)


def _packed_matmul(node: ir.Node) -> _LayerInfo | None:
    weight = find_weight(node.inputs[1])
    sizes = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
    if weight is None or not all(sizes) or not node.attributes.get_int("transB", 1):
        return None
    return _LayerInfo(LINEAR, *sizes, weight.stored)


def _gather(node: ir.Node) -> _LayerInfo | None:
    table, indices = find_weight(node.inputs[0]), node.inputs[1]
    if table is None or len(table.shape) != 2 or min(table.shape) < 2 or indices is None:
        return None
    # Gather also reads rows of constants, such as shapes: an embedding has computed indices.
    if node.attributes.get_int("axis", 0) or find_weight(indices) is not None:
        return None
    if not _has_float_table(node):
        return None
    return _LayerInfo(EMBEDDING, *table.shape, table.stored)


def _packed_gather(node: ir.Node) -> _LayerInfo | None:
    table = find_weight(node.inputs[0])
    if table is None or len(table.shape) != 2 or node.attributes.get_int("gather_axis", 0):
        return None
    rows, width = table.shape
    if table.stored[0].dtype == ir.DataType.UINT8:
        width = width * 8 // node.attributes.get_int("bits", 4)
    return _LayerInfo(EMBEDDING, rows, width, table.stored)


def _conv(node: ir.Node) -> _LayerInfo | None:
    kernel = find_weight(node.inputs[1], 0)
    if kernel is None or len(kernel.shape) < 3:
        return None
    n, k, *kernel_size = kernel.shape
    groups = node.attributes.get_int("group", 1)
    return _LayerInfo(CONV, k * groups, n, kernel.stored, kernel=tuple(kernel_size), groups=groups)


def _has_float_table(node: ir.Node) -> bool:
    # A computed table is the output of DequantizeLinear or Cast, whose type may be missing.
    table = node.inputs[0]
    return table is not None and (table.producer() is not None or S.is_float(table))


_READERS: dict[str, Callable[[ir.Node], _LayerInfo | None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Gather": _gather,
    "com.microsoft::MatMulNBits": _packed_matmul,
    "com.microsoft::MatMulBnb4": _packed_matmul,
    "com.microsoft::GatherBlockQuantized": _packed_gather,
}


@dataclasses.dataclass(frozen=True)
class TargetSlice:
    """Columns of a layer's output, and their first column in a module's output."""

    layer: BaseLayer
    start: int
    width: int
    column: int = 0


@dataclasses.dataclass(frozen=True)
class TargetModule:
    """A torch module that can have an adapter, and the slices of layer outputs that compute it."""

    module: str
    kind: str
    inputs: int
    outputs: int
    slices: tuple[TargetSlice, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel size of a convolution."""
        return self.slices[0].layer.kernel

    @property
    def groups(self) -> int:
        """The groups of a convolution; 1 for other modules."""
        return self.slices[0].layer.groups

    @property
    def dtype(self) -> ir.DataType:
        """The type of the output."""
        return self.slices[0].layer.dtype

    @property
    def max_rank(self) -> int:
        """The largest rank: a larger one adds parameters and no expressiveness."""
        return min(self.inputs * math.prod(self.kernel), self.outputs)


def find_target_modules(layers: Sequence[BaseLayer], family: str | None) -> list[TargetModule]:
    """Return the modules of a model, packed as transformers packs them in this family."""
    found: dict[str, TargetModule] = {}
    for layer in layers:
        start = 0
        for module, width in layer.modules:
            columns = (TargetSlice(layer, start, width),)
            _add_target(found, TargetModule(module, layer.kind, layer.inputs, width, columns))
            start += width
    candidates = _join_packed(found, PACKED.get(family or "", {}))
    return [dataclasses.replace(t, module=transformers_name(t.module, family)) for t in candidates]


def _add_target(candidates: dict[str, TargetModule], target: TargetModule) -> None:
    """Add a module; a second layer with the same weights becomes another slice of the first."""
    old = candidates.get(target.module)
    if old is not None and _same_weights(old, target):
        candidates[target.module] = dataclasses.replace(old, slices=(*old.slices, *target.slices))
        return
    name, n = target.module, 1
    while name in candidates:
        name, n = f"{target.module}_{n}", n + 1
    candidates[name] = dataclasses.replace(target, module=name)


def _same_weights(a: TargetModule, b: TargetModule) -> bool:
    first, second = a.slices[0], b.slices[0]
    return (
        a.kind == b.kind
        and first.layer.weights == second.layer.weights
        and (first.start, first.width) == (second.start, second.width)
    )


def _join_packed(
    found: dict[str, TargetModule], packed: dict[str, tuple[str, ...]]
) -> list[TargetModule]:
    """Return the modules with the members of each packed module joined, in graph order."""
    members_of: dict[str, list[str]] = {}
    for whole, members in packed.items():
        for name in found:
            if name.endswith("." + members[0]):
                stem = name.removesuffix(members[0])
                names = [stem + m for m in members]
                if all(n in found and found[n].kind == LINEAR for n in names):
                    members_of[stem + whole] = names
    whole_of_first = {names[0]: whole for whole, names in members_of.items()}
    joined = {n for names in members_of.values() for n in names}
    candidates = []
    for name, module in found.items():
        if name in whole_of_first:
            whole = whole_of_first[name]
            candidates.append(_packed_target(whole, [found[n] for n in members_of[whole]]))
        elif name not in joined:
            candidates.append(module)
    return candidates


def _packed_target(module: str, members: Sequence[TargetModule]) -> TargetModule:
    slices: list[TargetSlice] = []
    column = 0
    for member in members:
        slices += [dataclasses.replace(s, column=column) for s in member.slices]
        column += member.outputs
    return TargetModule(module, LINEAR, members[0].inputs, column, tuple(slices))


ATTENTION, ALL_LINEAR = "attention", "all-linear"
_ATTENTION_PATH = re.compile(r"(^|\.)\w*(attn|attention)\w*\.", re.IGNORECASE)
_ATTENTION_NAMES = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "in_proj", "Wqkv"),
        *("q_lin", "k_lin", "v_lin", "out_lin", "query", "key", "value", "query_key_value"),
        *("c_attn", "to_q", "to_k", "to_v"),
    )
)
# Names of heads in transformers that "all-linear" leaves out, as in PEFT.
_HEADS = frozenset({"lm_head", "embed_out", "output_projection"})
_AFTER_HEAD = ("Add", "Cast", "Div", "Mul", "Tanh", "Softmax", "LogSoftmax", "Identity", "Sigmoid")
_MAX_LISTED = 8


def select_targets(
    candidates: Sequence[TargetModule], targets: str | Sequence[str]
) -> list[TargetModule]:
    """Return the modules that ``targets`` selects, in graph order.

    Raises:
        PrepareError: if the model has no such module, or a pattern matches none.
    """
    if not candidates:
        raise PrepareError(
            "the model has no layer that can have an adapter\n"
            "hint: adapters need MatMul, Gemm, MatMulNBits, MatMulBnb4, Gather or Conv nodes whose "
            "weights are initializers"
        )
    selected: set[str] = set()
    for pattern in [targets] if isinstance(targets, str) else targets:
        matches = _matching(candidates, pattern)
        if not matches:
            raise PrepareError(_no_match_message(candidates, pattern))
        selected.update(t.module for t in matches)
    if not selected:
        raise PrepareError(
            "`targets` is empty\nhint: pass 'attention', 'all-linear' or names of layers"
        )
    return [t for t in candidates if t.module in selected]


def _matching(candidates: Sequence[TargetModule], pattern: str) -> list[TargetModule]:
    if pattern == ATTENTION:
        return [t for t in candidates if t.kind == LINEAR and _in_attention(t.module)]
    if pattern == ALL_LINEAR:
        linear = [t for t in candidates if t.kind == LINEAR]
        inner = [t for t in linear if not _is_head(t)]
        return inner or linear
    return [t for t in candidates if any(_matches(name, pattern) for name in _names(t))]


def _in_attention(module: str) -> bool:
    return _ATTENTION_PATH.search(module) is not None or module.split(".")[-1] in _ATTENTION_NAMES


def _names(target: TargetModule) -> list[str]:
    """Return the names that ``targets`` may use: of the module, its layers, nodes and weights."""
    names = [target.module]
    for layer in (s.layer for s in target.slices):
        names += [layer.module, layer.node.name or "", *(w.name or "" for w in layer.weights)]
    return names


def _matches(name: str, pattern: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith("." + pattern)


def _is_head(target: TargetModule) -> bool:
    """Return whether a module computes an output of the model."""
    if target.module.split(".")[-1] in _HEADS:
        return True
    return any(_reaches_output(s.layer.y) for s in target.slices)


def _reaches_output(y: ir.Value) -> bool:
    pending, seen = [y], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return True
        if value in seen:
            continue
        seen.add(value)
        pending += [
            u.node.outputs[0]
            for u in value.uses()
            if is_op(u.node, *_AFTER_HEAD) and _other_inputs_constant(u.node, value)
        ]
    return False


def _other_inputs_constant(node: ir.Node, value: ir.Value) -> bool:
    others = [x for x in node.inputs if x is not None and x is not value]
    return all(x.is_initializer() or x.const_value is not None for x in others)


def _no_match_message(candidates: Sequence[TargetModule], target: str) -> str:
    modules = [t.module for t in candidates]
    last = list(dict.fromkeys(m.split(".")[-1] for m in modules))
    near = [
        *difflib.get_close_matches(target, last, n=3, cutoff=0.4),
        *difflib.get_close_matches(target, modules, n=3, cutoff=0.4),
    ]
    names = near or [*last, *modules]
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    listing = ", ".join(dict.fromkeys(names[:_MAX_LISTED]))
    return (
        f"`targets` matches no layer: {target!r}\n"
        f"hint: the model has {listing}{more}; 'attention' and 'all-linear' select groups"
    )


def frozen_weight(layer: BaseLayer) -> np.ndarray:
    """Return the weight of a layer in float32.

    Linear layers have ``[inputs, outputs]``, convolutions their kernel, embeddings their table.
    """
    node, key = layer.node, op_key(layer.node)
    if key == "com.microsoft::MatMulNBits":
        return packed_rows(node)[:, : layer.inputs].T
    if key == "com.microsoft::MatMulBnb4":
        return _bnb4(layer).T
    if key == "com.microsoft::GatherBlockQuantized":
        return _packed_table(layer)
    weight = node.inputs[0 if layer.kind == EMBEDDING else 1]
    assert weight is not None
    array = weight_values(weight).astype(np.float32)
    if layer.kind in (CONV, EMBEDDING):
        return array
    if is_op(node, "Gemm"):
        array = array.T if node.attributes.get_int("transB", 0) else array
        return array * np.float32(node.attributes.get_float("alpha", 1.0))
    return array


def packed_rows(node: ir.Node) -> np.ndarray:
    """Return the weight of MatMulNBits, ``[N, blocks * block_size]``; the last block is padded."""
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    n, k = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    packed = PackedFormat(bits, block)
    blocks = -(-k // block)
    raw, scales, zero_points, g_idx = (_array(node, i) for i in (1, 2, 3, 4))
    assert raw is not None
    assert scales is not None
    codes = packed.unpack(raw.reshape(n, -1)).astype(np.float32)
    scales = scales.reshape(n, blocks).astype(np.float32)
    if zero_points is None:
        zeros = np.full_like(scales, packed.middle)
    elif zero_points.dtype == np.uint8:
        zeros = packed.unpack(zero_points.reshape(n, -1))[:, :blocks].astype(np.float32)
    else:
        zeros = zero_points.reshape(n, blocks).astype(np.float32)
    if g_idx is not None:
        return (codes[:, :k] - zeros[:, g_idx]) * scales[:, g_idx]
    by_block = codes.reshape(n, blocks, block)
    return ((by_block - zeros[..., None]) * scales[..., None]).reshape(n, -1)


def _array(node: ir.Node, index: int) -> np.ndarray | None:
    x = node.inputs[index] if len(node.inputs) > index else None
    return None if x is None else weight_values(x)


def _bnb4(layer: BaseLayer) -> np.ndarray:
    """Return the weight of MatMulBnb4, ``[outputs, inputs]``."""
    node = layer.node
    raw, absmax = node.inputs[1], node.inputs[2]
    assert raw is not None
    assert absmax is not None
    flat = weight_values(raw).reshape(-1)
    codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)
    table = np.array(BNB4[node.attributes.get_int("quant_type", 1)], np.float32)
    block = node.attributes.get_int("block_size", 64)
    size = layer.inputs * layer.outputs
    scales = np.repeat(weight_values(absmax).reshape(-1).astype(np.float32), block)[:size]
    return (table[codes[:size]] * scales).reshape(layer.outputs, layer.inputs)


def _packed_table(layer: BaseLayer) -> np.ndarray:
    """Return the table of GatherBlockQuantized."""
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 128)
    raw, scales, zero_points = (_array(node, i) for i in (0, 2, 3))
    assert raw is not None
    assert scales is not None
    # uint8 holds several codes per byte; int4 and uint4 tensors are unpacked by onnx_ir.
    unpacked = raw.dtype != np.uint8
    packed = PackedFormat(8 if unpacked else bits, block)
    codes = (raw if unpacked else packed.unpack(raw)).astype(np.float32)
    zeros = np.float32(0 if unpacked else packed.middle)
    if zero_points is not None:
        per_block = zero_points if unpacked else packed.unpack(zero_points)
        zeros = np.repeat(per_block.astype(np.float32), block, axis=1)[:, : codes.shape[1]]
    factors = np.repeat(scales.astype(np.float32), block, axis=1)[:, : codes.shape[1]]
    return (codes - zeros) * factors
