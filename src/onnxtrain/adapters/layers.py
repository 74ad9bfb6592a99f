"""Which modules get adapters: by a word, or by names and patterns.

What gets one adapter: a module, in one layer or spread over several.

Layers with frozen weights that a low-rank branch can be put beside.

Weights as products read them: stored tensors, or what a few operators make of stored tensors.

The numbers of frozen layers, as floats: one layer at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
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
    """A frozen tensor: the value that a product reads, its size, and the tensors it comes from."""

    value: ir.Value
    shape: tuple[int, ...]
    stored: tuple[ir.Value, ...]
    """Initializers, in order; more than one if they are joined."""
    joined: tuple[tuple[ir.Value, int], ...] = ()
    """The initializers that lie side by side along the output axis, each with its width."""


def find_weight(value: ir.Value | None, outputs_axis: int = 1) -> WeightSource | None:
    """Return the weight behind a value; ``None`` if it is computed from anything but weights.

    Args:
        value: what a product reads.
        outputs_axis: which of its axes counts the outputs of the layer.
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
    """Return the numbers of a weight, as floats; the graph is followed back to stored tensors."""
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
    numbers, scale = inputs[0], inputs[1]
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    wide = numbers.astype(np.float32)
    point = inputs[2].astype(np.float32) if len(inputs) > 2 else np.zeros_like(scale, np.float32)
    factor = scale.astype(np.float32)
    if block:
        size = wide.shape[axis]
        factor, point = (
            np.repeat(a, block, axis=axis).take(range(size), axis=axis) for a in (factor, point)
        )
    elif factor.ndim == 1 and factor.size > 1:
        sizes = [1] * wide.ndim
        sizes[axis] = -1
        factor, point = factor.reshape(sizes), point.reshape(sizes)
    return (wide - point) * factor


LINEAR, EMBEDDING, CONV = "linear", "embedding", "conv"
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class OutputSlice:
    """Columns of a layer's output that are a module of their own."""

    module: str
    start: int
    width: int


@dataclasses.dataclass(frozen=True)
class BaseLayer:
    """A node with frozen weights, and the modules that its output consists of."""

    node: ir.Node
    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    module: str
    parts: tuple[OutputSlice, ...]
    kernel: tuple[int, ...] = ()
    """Sizes of a convolution's window."""
    groups: int = 1

    @property
    def x(self) -> ir.Value:
        """The activations that the layer reads; of an embedding, the row numbers."""
        x = self.node.inputs[1 if self.kind == EMBEDDING else 0]
        assert x is not None
        return x

    @property
    def dtype(self) -> ir.DataType:
        """The type of what the layer gives, by its floats; float32 if nothing tells."""
        scales = self.node.inputs[2:3] if self.node.domain else []
        for value in (self.y, self.x, *self.node.inputs[:2], *scales, *self.weights):
            dtype = None if value is None else value.dtype
            if dtype is not None and dtype in S.FLOATS:
                return dtype
        return ir.DataType.FLOAT

    @property
    def y(self) -> ir.Value:
        """What the layer gives."""
        return self.node.outputs[0]


@dataclasses.dataclass(frozen=True)
class _LayerInfo:
    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    joined: tuple[tuple[ir.Value, int], ...] = ()
    kernel: tuple[int, ...] = ()
    groups: int = 1


def find_base_layers(graph: ir.Graph) -> list[BaseLayer]:
    """Return every layer of the graph that can have a branch, in order."""
    layers = []
    for node in graph:
        read = _READERS.get(op_key(node))
        shape = None if read is None else read(node)
        if shape is not None:
            layers.append(_layer(node, shape))
    return layers


def _layer(node: ir.Node, shape: _LayerInfo) -> BaseLayer:
    module = module_name(node, shape.weights, shared=_is_shared(shape))
    return BaseLayer(
        node,
        shape.kind,
        shape.inputs,
        shape.outputs,
        shape.weights,
        module,
        tuple(_parts(node, module, shape)),
        shape.kernel,
        shape.groups,
    )


def _is_shared(shape: _LayerInfo) -> bool:
    """Return whether a product reads the table of an embedding."""
    return shape.kind == LINEAR and any(
        use.node.op_type in ("Gather", "GatherBlockQuantized") for use in shape.weights[0].uses()
    )


def _parts(node: ir.Node, module: str, shape: _LayerInfo) -> list[OutputSlice]:
    """Return the modules side by side in the output of a layer."""
    whole = [OutputSlice(module, 0, shape.outputs)]
    if shape.joined:
        parts, at = [], 0
        for weight, width in shape.joined:
            parts.append(OutputSlice(weight_module(weight), at, width))
            at += width
        return parts
    stem, _, last = module.rpartition(".")
    if shape.kind != LINEAR or last != "qkv_proj" or not is_genai_builder(shape.weights):
        return whole
    widths = _packed_widths(node.outputs[0])
    if widths is None or sum(widths) != shape.outputs:
        return whole
    starts = (0, widths[0], widths[0] + widths[1])
    return [
        OutputSlice(f"{stem}.{name}", at, width)
        for name, at, width in zip(_QKV, starts, widths, strict=True)
    ]


def _packed_widths(y: ir.Value) -> tuple[int, int, int] | None:
    """Return how wide queries, keys and values are, by what reads them."""
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
    """Return the outputs of the layer that a value comes from, through a bias."""
    node = y.producer()
    while node is not None and is_op(node, "Add", "Cast"):
        first = node.inputs[0]
        node = None if first is None else first.producer()
    read = None if node is None else _READERS.get(op_key(node))
    shape = None if read is None or node is None else read(node)
    return None if shape is None else shape.outputs


def _matmul(node: ir.Node) -> _LayerInfo | None:
    weight = find_weight(node.inputs[1])
    if weight is None or len(weight.shape) != 2 or find_weight(node.inputs[0]) is not None:
        return None
    k, n = weight.shape
    return _LayerInfo(LINEAR, k, n, weight.stored, weight.joined)


def _gemm(node: ir.Node) -> _LayerInfo | None:
    if node.attributes.get_int("transA", 0) or find_weight(node.inputs[0]) is not None:
        return None
    turned = node.attributes.get_int("transB", 0)
    weight = find_weight(node.inputs[1], 0 if turned else 1)
    if weight is None or len(weight.shape) != 2:
        return None
    k, n = reversed(weight.shape) if turned else weight.shape
    return _LayerInfo(LINEAR, k, n, weight.stored, weight.joined)


def _packed_matmul(node: ir.Node) -> _LayerInfo | None:
    weight = find_weight(node.inputs[1])
    sizes = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
    if weight is None or not all(sizes) or not node.attributes.get_int("transB", 1):
        return None
    return _LayerInfo(LINEAR, *sizes, weight.stored)


def _gather(node: ir.Node) -> _LayerInfo | None:
    table, rows = find_weight(node.inputs[0]), node.inputs[1]
    if table is None or len(table.shape) != 2 or min(table.shape) < 2 or rows is None:
        return None
    if node.attributes.get_int("axis", 0) or find_weight(rows) is not None or not _is_float(node):
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
    n, k, *window = kernel.shape
    groups = node.attributes.get_int("group", 1)
    return _LayerInfo(CONV, k * groups, n, kernel.stored, kernel=tuple(window), groups=groups)


def _is_float(node: ir.Node) -> bool:
    table = node.inputs[0]
    maker = None if table is None else table.producer()
    return maker is not None or (table is not None and S.is_float(table))


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
    """Where a module's output lies: columns of a layer's output, columns of the module's own."""

    layer: BaseLayer
    start: int
    width: int
    column: int = 0


@dataclasses.dataclass(frozen=True)
class TargetModule:
    """A module of torch: it reads ``inputs`` numbers and gives ``outputs``, at some sites."""

    module: str
    kind: str
    inputs: int
    outputs: int
    sites: tuple[TargetSlice, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Sizes of a convolution's window."""
        return self.sites[0].layer.kernel

    @property
    def groups(self) -> int:
        """Groups of a convolution, 1 of all else."""
        return self.sites[0].layer.groups

    @property
    def dtype(self) -> ir.DataType:
        """The type of what the module gives."""
        return self.sites[0].layer.dtype

    @property
    def largest_rank(self) -> int:
        """The rank from which on a branch could be any matrix."""
        reach = self.inputs
        for size in self.kernel:
            reach *= size
        return min(reach, self.outputs)


def find_target_modules(layers: Sequence[BaseLayer], family: str | None) -> list[TargetModule]:
    """Return the modules of a model; those that torch packs in this family are one."""
    parts: dict[str, TargetModule] = {}
    for layer in layers:
        for part in layer.parts:
            site = TargetSlice(layer, part.start, part.width)
            _add_target(
                parts, TargetModule(part.module, layer.kind, layer.inputs, part.width, (site,))
            )
    units = _join_packed(parts, PACKED.get(family or "", {}))
    return [dataclasses.replace(u, module=transformers_name(u.module, family)) for u in units]


def _add_target(units: dict[str, TargetModule], unit: TargetModule) -> None:
    """Add a unit; one that reads the weights of another is that one at a further site."""
    old = units.get(unit.module)
    if old is not None and _same_weights(old, unit):
        units[unit.module] = dataclasses.replace(old, sites=(*old.sites, *unit.sites))
        return
    name, n = unit.module, 1
    while name in units:
        name, n = f"{unit.module}_{n}", n + 1
    units[name] = dataclasses.replace(unit, module=name)


def _same_weights(a: TargetModule, b: TargetModule) -> bool:
    first, second = a.sites[0], b.sites[0]
    return (
        a.kind == b.kind
        and first.layer.weights == second.layer.weights
        and (first.start, first.width) == (second.start, second.width)
    )


def _join_packed(
    parts: dict[str, TargetModule], packed: dict[str, tuple[str, ...]]
) -> list[TargetModule]:
    """Return the units with parts of a packed module put together, in the order of the file."""
    wholes: dict[str, list[str]] = collections.defaultdict(list)
    for whole, members in packed.items():
        for name in parts:
            if name.endswith("." + members[0]):
                stem = name.removesuffix(members[0])
                names = [stem + m for m in members]
                if all(n in parts and parts[n].kind == LINEAR for n in names):
                    wholes[stem + whole] = names
    first = {names[0]: whole for whole, names in wholes.items()}
    swallowed = {n for names in wholes.values() for n in names}
    units = []
    for name, unit in parts.items():
        if name in first:
            units.append(_packed_target(first[name], [parts[n] for n in wholes[first[name]]]))
        elif name not in swallowed:
            units.append(unit)
    return units


def _packed_target(module: str, members: Sequence[TargetModule]) -> TargetModule:
    sites: list[TargetSlice] = []
    column = 0
    for member in members:
        sites += [dataclasses.replace(s, column=column) for s in member.sites]
        column += member.outputs
    return TargetModule(module, LINEAR, members[0].inputs, column, tuple(sites))


ATTENTION, ALL_LINEAR = "attention", "all-linear"
_IN_ATTENTION = re.compile(r"(^|\.)\w*(attn|attention)\w*\.", re.IGNORECASE)
_BY_LAST_NAME = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "in_proj", "Wqkv"),
        *("q_lin", "k_lin", "v_lin", "out_lin", "query", "key", "value", "query_key_value"),
        *("c_attn", "to_q", "to_k", "to_v"),
    )
)
_HEADS = frozenset({"lm_head", "embed_out", "output_projection"})
_AFTER_HEAD = ("Add", "Cast", "Div", "Mul", "Tanh", "Softmax", "LogSoftmax", "Identity", "Sigmoid")
_MAX_LISTED = 8


def select_targets(
    units: Sequence[TargetModule], targets: str | Sequence[str]
) -> list[TargetModule]:
    """Return the units that ``targets`` names, in the order of the file.

    Raises:
        PrepareError: if a pattern matches nothing; near names are listed.
    """
    if not units:
        raise PrepareError(
            "the model has no layer that an adapter could be put beside\n"
            "hint: adapters go beside MatMul, Gemm, MatMulNBits, MatMulBnb4, Gather and Conv whose "
            "weights are stored in the file"
        )
    chosen: dict[str, TargetModule] = {}
    for wanted in [targets] if isinstance(targets, str) else targets:
        hits = _matching(units, wanted)
        if not hits:
            raise PrepareError(_no_match_message(units, wanted))
        chosen.update((u.module, u) for u in hits)
    if not chosen:
        raise PrepareError("`targets` is empty\nhint: attention, all-linear, or names of layers")
    return [u for u in units if u.module in chosen]


def _matching(units: Sequence[TargetModule], wanted: str) -> list[TargetModule]:
    if wanted == ATTENTION:
        return [u for u in units if u.kind == LINEAR and _in_attention(u.module)]
    if wanted == ALL_LINEAR:
        linear = [u for u in units if u.kind == LINEAR]
        inner = [u for u in linear if not _is_head(u)]
        return inner or linear
    return [u for u in units if any(_matches_target(name, wanted) for name in _names(u))]


def _in_attention(module: str) -> bool:
    return _IN_ATTENTION.search(module) is not None or module.split(".")[-1] in _BY_LAST_NAME


def _names(unit: TargetModule) -> list[str]:
    """Return what a user may call a unit: its module, its parts, the nodes and weights."""
    layers = [s.layer for s in unit.sites]
    names = [unit.module]
    for layer in layers:
        names += [layer.module, layer.node.name or "", *(w.name or "" for w in layer.weights)]
    return names


def _matches_target(name: str, target: str) -> bool:
    if any(c in target for c in "*?["):
        return fnmatch.fnmatchcase(name, target)
    return name == target or name.endswith("." + target)


def _is_head(unit: TargetModule) -> bool:
    """Return whether a unit makes an output of the model: the head stays as it is."""
    if unit.module.split(".")[-1] in _HEADS:
        return True
    return any(_reaches_output(site.layer.y) for site in unit.sites)


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


def _no_match_message(units: Sequence[TargetModule], target: str) -> str:
    modules = [u.module for u in units]
    last = list(dict.fromkeys(m.split(".")[-1] for m in modules))
    near = [
        *difflib.get_close_matches(target, last, n=3, cutoff=0.4),
        *difflib.get_close_matches(target, modules, n=3, cutoff=0.4),
    ]
    choice = near or [*last, *modules]
    more = f" and {len(choice) - _MAX_LISTED} more" if len(choice) > _MAX_LISTED else ""
    listing = ", ".join(dict.fromkeys(choice[:_MAX_LISTED]))
    return (
        f"`targets` matches no layer: {target!r}\n"
        f"hint: the model has {listing}{more}; or take 'attention' or 'all-linear'"
    )


def frozen_weight(layer: BaseLayer) -> np.ndarray:
    """Return the weights of a layer in float32.

    They are [inputs, outputs] of a linear layer, the kernel of a convolution, the table of an
    embedding.
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
    """Return the weights of MatMulNBits, [N, blocks * block]: the last block may be filled up."""
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    n, k = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    packed = PackedFormat(bits, block)
    blocks = -(-k // block)
    raw, scales, points, groups = (_array(node, i) for i in (1, 2, 3, 4))
    assert raw is not None
    assert scales is not None
    numbers = packed.unpack(raw.reshape(n, -1)).astype(np.float32)
    scales = scales.reshape(n, blocks).astype(np.float32)
    if points is None:
        middle = np.full_like(scales, packed.middle)
    elif points.dtype == np.uint8:
        middle = packed.unpack(points.reshape(n, -1))[:, :blocks].astype(np.float32)
    else:
        middle = points.reshape(n, blocks).astype(np.float32)
    if groups is not None:
        return (numbers[:, :k] - middle[:, groups]) * scales[:, groups]
    wide = numbers.reshape(n, blocks, block)
    return ((wide - middle[..., None]) * scales[..., None]).reshape(n, -1)


def _array(node: ir.Node, place: int) -> np.ndarray | None:
    x = node.inputs[place] if len(node.inputs) > place else None
    return None if x is None else weight_values(x)


def _bnb4(layer: BaseLayer) -> np.ndarray:
    """Return the weights of MatMulBnb4, [outputs, inputs]."""
    node = layer.node
    raw, largest = node.inputs[1], node.inputs[2]
    assert raw is not None
    assert largest is not None
    flat = weight_values(raw).reshape(-1)
    codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)
    table = np.array(BNB4[node.attributes.get_int("quant_type", 1)], np.float32)
    block = node.attributes.get_int("block_size", 64)
    size = layer.inputs * layer.outputs
    scales = np.repeat(weight_values(largest).reshape(-1).astype(np.float32), block)[:size]
    return (table[codes[:size]] * scales).reshape(layer.outputs, layer.inputs)


def _packed_table(layer: BaseLayer) -> np.ndarray:
    node = layer.node
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 128)
    raw, scales, points = (_array(node, i) for i in (0, 2, 3))
    assert raw is not None
    assert scales is not None
    narrow = raw.dtype != np.uint8
    packed = PackedFormat(8 if narrow else bits, block)
    numbers = raw.astype(np.float32) if narrow else packed.unpack(raw).astype(np.float32)
    middle = np.float32(0 if narrow else packed.middle)
    if points is not None:
        unpacked = points if narrow else packed.unpack(points)
        middle = np.repeat(unpacked.astype(np.float32), block, axis=1)[:, : numbers.shape[1]]
    wide = np.repeat(scales.astype(np.float32), block, axis=1)[:, : numbers.shape[1]]
    return (numbers - middle) * wide
