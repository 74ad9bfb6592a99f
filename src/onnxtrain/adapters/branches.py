"""The table of a model's adapters: one row per pair of matrices.

Shares of adapters in the output of a layer.

Adapters put into a graph: their matrices, their branches, their rows in the table.

Low-rank branches in the graph: ``y + scaling * (x A) B`` beside a frozen layer.

DoRA: a trained length for each output, while the branch turns the weights.

With ``V = W + s A B`` column by column, ``y = x V * m / |V|``. The length of V counts as a constant
when gradients are computed, as its authors propose. It needs no weights as floats:

``|V|^2 = |W|^2 + 2 s sum((A^T W) * B) + s^2 sum(B * (A^T A B))``,

where ``A^T W`` is the frozen layer itself, applied to the rows of ``A^T``.

With dropout, only what turns or stretches the weights reads the activations ``d`` that are left:
``y = x W + (m / |V| - 1) * d W + m / |V| * s d A B``, as in PEFT.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.layers import (
    CONV,
    EMBEDDING,
    LINEAR,
    BaseLayer,
    TargetModule,
    find_weight,
    frozen_weight,
)
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder, names_in, replace_value
from onnxtrain.graph.nodes import STOP_GRADIENT, is_op
from onnxtrain.importer.parameters import PARAMETERS


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
class AdapterSlice:
    """An adapter's share in the output of one layer."""

    a: ir.Value
    b: ir.Value
    scaling: float
    rank: int
    start: int
    width: int
    column: int
    outputs: int
    """How many columns ``b`` has in all."""
    magnitude: ir.Value | None = None
    squared_length: ir.Value | None = None
    """Of the frozen weights of each output, with DoRA."""


_BIAS = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5}  # the place of the bias among the inputs


def weight_norms(unit: TargetModule) -> np.ndarray:
    """Return the length of the frozen weights of each output."""
    parts = []
    for site in unit.sites:
        weight = frozen_weight(site.layer).astype(np.float64)
        if site.layer.kind == CONV:
            parts.append(np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)))))
        elif site.column == sum(p.size for p in parts):
            columns = weight[:, site.start : site.start + site.width]
            parts.append(np.sqrt((columns**2).sum(axis=0)))
    return np.concatenate(parts)


def apply_magnitude(
    op: OpBuilder, layer: BaseLayer, pieces: Sequence[AdapterSlice], branch: ir.Value, x: ir.Value
) -> ir.Value:
    """Return what takes the place of a layer's output; its bias is added behind, in place.

    Args:
        op: writes nodes behind the layer.
        layer: the frozen layer.
        pieces: the adapters in its output.
        branch: what they add.
        x: the activations that the branch reads.
    """
    if x is not layer.x:
        factors = _magnitude_factors(op, layer, pieces)
        stretched = op.Mul(_apply_base_layer(op, layer, x), op.Sub(factors, 1.0))
        return op.Add(layer.y, op.Add(stretched, op.Mul(branch, factors)))
    bias = _take_bias(layer.node)
    total = op.Mul(op.Add(layer.y, branch), _magnitude_factors(op, layer, pieces))
    return total if bias is None else op.Add(total, _per_channel(op, layer, bias))


def _take_bias(node: ir.Node) -> ir.Value | None:
    place = _BIAS.get(node.op_type, 0)
    bias = node.inputs[place] if place and len(node.inputs) > place else None
    if bias is not None:
        node.replace_input_with(place, None)
    return bias


def _per_channel(op: OpBuilder, layer: BaseLayer, x: ir.Value) -> ir.Value:
    """Return a vector over the outputs in the shape that it is broadcast in."""
    if layer.kind != CONV:
        beta = layer.node.attributes.get_float("beta", 1.0) if is_op(layer.node, "Gemm") else 1.0
        return x if beta == 1.0 else op.Mul(x, beta)
    return op.Reshape(x, [-1, *[1] * len(layer.kernel)])


def _magnitude_factors(op: OpBuilder, layer: BaseLayer, pieces: Sequence[AdapterSlice]) -> ir.Value:
    """Return what each output is multiplied by; outputs without an adapter stay as they are."""
    parts, at = [], 0
    for piece in sorted(pieces, key=lambda p: p.start):
        if piece.start > at:
            parts.append(op.const(np.ones(piece.start - at), layer.dtype))
        parts.append(_magnitude_factor(op, layer, piece))
        at = piece.start + piece.width
    if at < layer.outputs:
        parts.append(op.const(np.ones(layer.outputs - at), layer.dtype))
    whole = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
    return _per_channel(op, layer, whole) if layer.kind == CONV else whole


def _magnitude_factor(op: OpBuilder, layer: BaseLayer, piece: AdapterSlice) -> ir.Value:
    """Return ``m / |V|`` of a piece."""
    assert piece.magnitude is not None
    assert piece.squared_length is not None
    rows, images = _lora_a_and_projection(op, layer, piece)
    b = op.Transpose(op.Reshape(piece.b, [-1, piece.rank])) if layer.kind == CONV else piece.b
    own = piece.column, piece.column + piece.width
    magnitude, fixed = piece.magnitude, piece.squared_length
    if piece.width != piece.outputs:
        b = op.Slice(b, [own[0]], [own[1]], [1])
        magnitude, fixed = (op.Slice(v, [own[0]], [own[1]], [0]) for v in (magnitude, fixed))
    gram = op.MatMul(rows, op.Transpose(rows, perm=[1, 0]))
    mixed = op.ReduceSum(op.Mul(images, b), [0], keepdims=0)
    square = op.ReduceSum(op.Mul(b, op.MatMul(gram, b)), [0], keepdims=0)
    s = piece.scaling
    length = op.Sqrt(op.Add(fixed, op.Add(op.Mul(mixed, 2 * s), op.Mul(square, s * s))))
    return op.Div(magnitude, _stop_gradient(op, length))


def _lora_a_and_projection(
    op: OpBuilder, layer: BaseLayer, piece: AdapterSlice
) -> tuple[ir.Value, ir.Value]:
    """Return ``A^T`` and ``A^T W`` on the columns of a piece."""
    if layer.kind == CONV:
        rows = op.Reshape(piece.a, [piece.rank, -1])
        kernel = op.Reshape(layer.node.inputs[1], [layer.outputs, -1])
        return rows, op.MatMul(rows, op.Transpose(kernel, perm=[1, 0]))
    rows = op.Transpose(piece.a, perm=[1, 0])
    images = _apply_base_layer(op, layer, rows, leave="accuracy_level")
    if images.shape is None:
        images.shape = ir.Shape([piece.rank, layer.outputs])
    if piece.width != layer.outputs:
        images = op.Slice(images, [piece.start], [piece.start + piece.width], [1])
    return rows, images


def _apply_base_layer(op: OpBuilder, layer: BaseLayer, x: ir.Value, *, leave: str = "") -> ir.Value:
    """Return what the layer makes of other activations, without its bias."""
    node = layer.node
    attributes = [a for n, a in node.attributes.items() if n not in (leave, "beta")]
    keep = list(node.inputs)[: _BIAS.get(node.op_type, len(node.inputs))]
    copy = ir.Node(node.domain, node.op_type, [x, *keep[1:]], attributes, version=node.version)
    y = op.append(copy)
    if y.type is None:
        y.type = ir.TensorType(layer.dtype)
    return y


def _stop_gradient(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the same value for which no gradient is computed."""
    y = op.Identity(x)
    node = y.producer()
    assert node is not None
    node.name = op.names.fresh(f"{y.name}.{STOP_GRADIENT}")
    return y


_WINDOW = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


class BranchBuilder:
    """Puts branches into a graph; what several layers have in common is computed once."""

    def __init__(self, graph: ir.Graph, dropout: float) -> None:
        self.op = OpBuilder(graph, "lora/")
        self.dropout = dropout
        nodes = list(graph)
        self._behind = dict(zip(nodes, [*nodes[1:], None], strict=True))
        self._dropped: dict[ir.Value, ir.Value] = {}
        self._narrow: dict[tuple[ir.Value, tuple[ir.Value, ...]], ir.Value] = {}

    def add(self, layer: BaseLayer, pieces: Sequence[AdapterSlice]) -> ir.Value:
        """Put the branch of a layer into the graph; return the sum that takes its place."""
        op = self.op.before(self._behind[layer.node])
        y = layer.y
        _set_missing_types(layer)
        uses = [(u.node, u.idx) for u in y.uses()]
        branch = self.branch(op, layer, pieces)
        if pieces[0].magnitude is None:
            total = op.Add(y, branch)
        else:
            total = apply_magnitude(op, layer, pieces, branch, self._input(op, layer.x))
        total.type, total.shape = y.type, y.shape
        replace_value(y, total, uses)
        return total

    def branch(self, op: OpBuilder, layer: BaseLayer, pieces: Sequence[AdapterSlice]) -> ir.Value:
        """Return what is added to the output of a layer."""
        if layer.kind == EMBEDDING:
            (piece,) = pieces
            rows = _scale_activations(op, op.Gather(piece.a, layer.x, axis=0), pieces)
            return op.MatMul(rows, piece.b)
        if layer.kind == CONV:
            (piece,) = pieces
            window = {
                n: layer.node.attributes[n].value for n in _WINDOW if n in layer.node.attributes
            }
            narrow = op.Conv(self._input(op, layer.x), piece.a, **window)
            return op.Conv(_scale_activations(op, narrow, pieces), piece.b, group=layer.groups)
        return op.MatMul(
            self._rows(op, layer.x, pieces), _stack_b_factors(op, pieces, layer.outputs)
        )

    def _rows(self, op: OpBuilder, x: ir.Value, pieces: Sequence[AdapterSlice]) -> ir.Value:
        """Return ``x A`` of all pieces side by side, scaled."""
        key = x, tuple(p.a for p in pieces)
        if key not in self._narrow:
            matrices = [p.a for p in pieces]
            a = matrices[0] if len(matrices) == 1 else op.Concat(*matrices, axis=1)
            self._narrow[key] = _scale_activations(op, op.MatMul(self._input(op, x), a), pieces)
        return self._narrow[key]

    def _input(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return the activations that branches read: some are dropped in training, if asked."""
        if not self.dropout:
            return x
        if x not in self._dropped:
            ratio = op.const(np.float32(self.dropout))
            self._dropped[x] = op.Dropout(x, ratio)
        return self._dropped[x]


def _set_missing_types(layer: BaseLayer) -> None:
    """Give the ends of a layer their types where the file does not, in place."""
    for value in (layer.y, *([] if layer.kind == EMBEDDING else [layer.x])):
        if value.type is None:
            value.type = ir.TensorType(layer.dtype)
    weight = layer.node.inputs[1]
    stored = find_weight(weight) if layer.kind == LINEAR and not layer.node.domain else None
    if stored is not None and stored.value.type is None:
        stored.value.type = ir.TensorType(layer.dtype)
        stored.value.shape = ir.Shape(stored.shape)


def _scale_activations(op: OpBuilder, narrow: ir.Value, pieces: Sequence[AdapterSlice]) -> ir.Value:
    """Return the narrow activations times alpha / rank: there are few of them."""
    if all(p.scaling == 1.0 for p in pieces):
        return narrow
    if all(p.scaling == pieces[0].scaling for p in pieces):
        return op.Mul(narrow, pieces[0].scaling)
    columns = np.concatenate([np.full(p.rank, p.scaling, np.float32) for p in pieces])
    return op.Mul(narrow, op.const(columns, narrow.dtype))


def _stack_b_factors(op: OpBuilder, pieces: Sequence[AdapterSlice], outputs: int) -> ir.Value:
    """Return the second factors one below the other, each in its own columns of the output."""
    rows = []
    for p in pieces:
        b = p.b
        if p.width != p.outputs:
            b = op.Slice(b, [p.column], [p.column + p.width], [1])
        if p.width != outputs:
            b = op.Pad(b, [0, p.start, 0, outputs - p.start - p.width])
        rows.append(b)
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """A unit and the adapter that it is to have."""

    unit: TargetModule
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


def check_ranks(plans: Sequence[AdapterSpec]) -> None:
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


def attach_adapters(
    model: ir.Model, plans: Sequence[AdapterSpec], start: Mapping[str, np.ndarray], dropout: float
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
    pieces: dict[BaseLayer, list[AdapterSlice]] = collections.defaultdict(list)
    for plan in plans:
        unit = plan.unit
        a, b = (_parameter(graph, n, start[n], unit.dtype, taken) for n in plan.names)
        if plan.rank == 0:  # the size is for those to say who fill it
            a.shape, b.shape = _dynamic_rank_shapes(unit)
        extra: list[ir.Value] = []
        if plan.magnitude is not None:
            squared = weight_norms(unit) ** 2
            named = {plan.magnitude: start[plan.magnitude], f"{unit.module}.lora_length": squared}
            extra = [_parameter(graph, n, v, unit.dtype, taken) for n, v in named.items()]
        for s in unit.sites:
            place = s.start, s.width, s.column, unit.outputs
            pieces[s.layer].append(AdapterSlice(a, b, plan.scaling, plan.rank, *place, *extra))
        rows.append(_adapter_of(plan, a, b))
    branches = BranchBuilder(graph, dropout)
    for layer, shares in pieces.items():
        branches.add(layer, shares)
    model.metadata_props[PARAMETERS] = json.dumps([n for row in rows for n in row.parameters])
    return tuple(rows)


def _dynamic_rank_shapes(unit: TargetModule) -> tuple[ir.Shape, ir.Shape]:
    """Return shapes of both factors for any rank."""
    rank = f"lora_rank.{unit.module}"
    if unit.kind != CONV:
        return ir.Shape([unit.inputs, rank]), ir.Shape([rank, unit.outputs])
    narrow = rank if unit.groups == 1 else f"{rank}.group"
    ones = (1,) * len(unit.kernel)
    return ir.Shape([rank, unit.inputs, *unit.kernel]), ir.Shape([unit.outputs, narrow, *ones])


def initial_values(plans: Sequence[AdapterSpec], seed: int) -> dict[str, np.ndarray]:
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
            values[plan.magnitude] = weight_norms(plan.unit)
    return values


def _adapter_of(plan: AdapterSpec, a: ir.Value, b: ir.Value) -> Adapter:
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
