"""Add LoRA and DoRA adapters to a graph.

``attach_adapters`` creates the matrices of each adapter and adds a branch to its base layer:

    before:  x -> MatMul(W) -> y
    after:   x -> MatMul(W) -> y -> Add -> total
             x -> MatMul(A) -> Mul(scaling) -> MatMul(B) -^

Layers that read the same x share its Dropout. A packed layer (query, key and value in one MatMul)
gets one branch: the A matrices are concatenated, the B matrices are padded to the packed width.

DoRA adds a trained magnitude m per output. With ``V = W + s A B`` and norms per column,

    y = x V * m / |V|
    |V|^2 = |W|^2 + 2 s sum((A^T W) * B) + s^2 sum(B * (A^T A B))

``A^T W`` is the base layer applied to the rows of ``A^T``, so quantized weights are never unpacked.
``|V|`` is constant in the backward pass, as section 4.3 of the DoRA paper proposes.

With dropout, x in the second and third term is the dropped-out input d, as in PEFT:

    y = x W + (m / |V| - 1) * d W + m / |V| * s d A B
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
from onnxtrain.graph.nodes import is_op
from onnxtrain.importer.parameters import PARAMETERS


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of one torch module: its initializers, sizes and scaling."""

    module: str
    """Path of the torch module, as in PEFT files."""
    kind: str
    """``linear``, ``embedding`` or ``conv``."""
    nodes: tuple[str, ...]
    """Names of the base layers' nodes."""
    a: str
    """Initializer of lora_A: ``[inputs, rank]``, or the kernel of a convolution."""
    b: str
    """Initializer of lora_B: ``[rank, outputs]``, or the kernel of a convolution."""
    magnitude: str | None
    """Initializer of the DoRA magnitudes, if any."""
    inputs: int
    outputs: int
    rank: int
    alpha: float
    scaling: float
    """``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    block: int = 0
    """Inputs that share a row of A, with ``blocks``; 0 if every input has its own."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trainable initializers."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def __str__(self) -> str:
        sizes = f"{self.kind} {self.inputs} -> {self.outputs}"
        return f"{self.module}: {sizes}, rank {self.rank}, scaling {self.scaling:g}"


@dataclasses.dataclass(frozen=True)
class AdapterSlice:
    """The columns of one layer's output that one adapter changes."""

    a: ir.Value
    b: ir.Value
    scaling: float
    rank: int
    start: int
    width: int
    column: int
    outputs: int
    """All columns of ``b``: more than ``width`` if the module spans several layers."""
    magnitude: ir.Value | None = None
    squared_norm: ir.Value | None = None
    """``|W|^2`` of each output of the module, with DoRA."""


_BIAS_INPUT = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5}


def weight_norms(target: TargetModule) -> np.ndarray:
    """Return the norm of the frozen weights of each output."""
    norms = []
    for s in target.slices:
        weight = frozen_weight(s.layer).astype(np.float64)
        if s.layer.kind == CONV:
            norms.append(np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)))))
        # A second layer with the same weights covers columns that are already there.
        elif s.column == sum(n.size for n in norms):
            columns = weight[:, s.start : s.start + s.width]
            norms.append(np.sqrt((columns**2).sum(axis=0)))
    return np.concatenate(norms)


def apply_magnitude(
    op: OpBuilder, layer: BaseLayer, slices: Sequence[AdapterSlice], branch: ir.Value, x: ir.Value
) -> ir.Value:
    """Return the DoRA output of a layer; without dropout, move its bias behind the scaling.

    Args:
        op: builder positioned after the layer.
        layer: the base layer.
        slices: the adapters in its output.
        branch: their LoRA output, ``s x A B``.
        x: the input of the branch: that of the layer, with dropout if there is any.
    """
    if x is not layer.x:
        factors = _magnitude_factors(op, layer, slices)
        scaled = op.Mul(_apply_base_layer(op, layer, x), op.Sub(factors, 1.0))
        return op.Add(layer.y, op.Add(scaled, op.Mul(branch, factors)))
    bias = _take_bias(layer.node)
    total = op.Mul(op.Add(layer.y, branch), _magnitude_factors(op, layer, slices))
    return total if bias is None else op.Add(total, _per_channel(op, layer, bias))


def _take_bias(node: ir.Node) -> ir.Value | None:
    """Remove the bias of a layer and return it, if there is one."""
    index = _BIAS_INPUT.get(node.op_type, 0)
    bias = node.inputs[index] if index and len(node.inputs) > index else None
    if bias is not None:
        node.replace_input_with(index, None)
    return bias


def _per_channel(op: OpBuilder, layer: BaseLayer, x: ir.Value) -> ir.Value:
    """Return a vector with one value per output in a shape that broadcasts to the output."""
    if layer.kind != CONV:
        beta = layer.node.attributes.get_float("beta", 1.0) if is_op(layer.node, "Gemm") else 1.0
        return x if beta == 1.0 else op.Mul(x, beta)
    return op.Reshape(x, [-1, *[1] * len(layer.kernel)])


def _magnitude_factors(op: OpBuilder, layer: BaseLayer, slices: Sequence[AdapterSlice]) -> ir.Value:
    """Return ``m / |V|`` of each output; 1 for outputs without an adapter."""
    factors, end = [], 0
    for part in sorted(slices, key=lambda p: p.start):
        if part.start > end:
            factors.append(op.const(np.ones(part.start - end), layer.dtype))
        factors.append(_magnitude_factor(op, layer, part))
        end = part.start + part.width
    if end < layer.outputs:
        factors.append(op.const(np.ones(layer.outputs - end), layer.dtype))
    whole = factors[0] if len(factors) == 1 else op.Concat(*factors, axis=0)
    return _per_channel(op, layer, whole) if layer.kind == CONV else whole


def _magnitude_factor(op: OpBuilder, layer: BaseLayer, part: AdapterSlice) -> ir.Value:
    """Return ``m / |V|`` of the columns of one adapter."""
    assert part.magnitude is not None
    assert part.squared_norm is not None
    a_t, a_t_w = _lora_a_and_projection(op, layer, part)
    b = op.Transpose(op.Reshape(part.b, [-1, part.rank])) if layer.kind == CONV else part.b
    start, end = part.column, part.column + part.width
    magnitude, w_squared = part.magnitude, part.squared_norm
    if part.width != part.outputs:
        b = op.Slice(b, [start], [end], [1])
        magnitude, w_squared = (op.Slice(v, [start], [end], [0]) for v in (magnitude, w_squared))
    gram = op.MatMul(a_t, op.Transpose(a_t, perm=[1, 0]))
    cross = op.ReduceSum(op.Mul(a_t_w, b), [0], keepdims=0)
    square = op.ReduceSum(op.Mul(b, op.MatMul(gram, b)), [0], keepdims=0)
    s = part.scaling
    norm = op.Sqrt(op.Add(w_squared, op.Add(op.Mul(cross, 2 * s), op.Mul(square, s * s))))
    return op.Div(magnitude, op.stop_gradient(norm))


def _lora_a_and_projection(
    op: OpBuilder, layer: BaseLayer, part: AdapterSlice
) -> tuple[ir.Value, ir.Value]:
    """Return ``A^T`` and the columns of ``A^T W`` that belong to one adapter."""
    if layer.kind == CONV:
        a_t = op.Reshape(part.a, [part.rank, -1])
        kernel = op.Reshape(layer.node.inputs[1], [layer.outputs, -1])
        return a_t, op.MatMul(a_t, op.Transpose(kernel, perm=[1, 0]))
    a_t = op.Transpose(part.a, perm=[1, 0])
    # accuracy_level=4 would round A^T to 8 bits, and the norm would not be that of the weights.
    a_t_w = _apply_base_layer(op, layer, a_t, without="accuracy_level")
    if a_t_w.shape is None:
        a_t_w.shape = ir.Shape([part.rank, layer.outputs])
    if part.width != layer.outputs:
        a_t_w = op.Slice(a_t_w, [part.start], [part.start + part.width], [1])
    return a_t, a_t_w


def _apply_base_layer(
    op: OpBuilder, layer: BaseLayer, x: ir.Value, *, without: str = ""
) -> ir.Value:
    """Return ``x W``: the base layer applied to another input, without its bias."""
    node = layer.node
    attributes = [a for n, a in node.attributes.items() if n not in (without, "beta")]
    inputs = list(node.inputs)[: _BIAS_INPUT.get(node.op_type, len(node.inputs))]
    copy = ir.Node(node.domain, node.op_type, [x, *inputs[1:]], attributes, version=node.version)
    y = op.append(copy)
    if y.type is None:
        y.type = ir.TensorType(layer.dtype)
    return y


_CONV_ATTRIBUTES = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


class BranchBuilder:
    """Adds branches to a graph; layers with a common input share its Dropout and ``x A``."""

    def __init__(self, graph: ir.Graph, dropout: float) -> None:
        self.op = OpBuilder(graph, "lora/")
        self.dropout = dropout
        nodes = list(graph)
        self._next_node = dict(zip(nodes, [*nodes[1:], None], strict=True))
        self._dropped_out: dict[ir.Value, ir.Value] = {}
        self._low_rank: dict[tuple[ir.Value, tuple[ir.Value, ...]], ir.Value] = {}

    def add(self, layer: BaseLayer, slices: Sequence[AdapterSlice]) -> ir.Value:
        """Add the branch of a layer and redirect the uses of its output; return the new output."""
        op = self.op.before(self._next_node[layer.node])
        y = layer.y
        _set_missing_types(layer)
        uses = [(u.node, u.idx) for u in y.uses()]
        branch = self.branch(op, layer, slices)
        if slices[0].magnitude is None:
            total = op.Add(y, branch)
        else:
            total = apply_magnitude(op, layer, slices, branch, self._input(op, layer.x))
        total.type, total.shape = y.type, y.shape
        replace_value(y, total, uses)
        return total

    def branch(self, op: OpBuilder, layer: BaseLayer, slices: Sequence[AdapterSlice]) -> ir.Value:
        """Return ``scaling * (x A) B``, zero in columns without an adapter."""
        if layer.kind == EMBEDDING:
            (part,) = slices
            rows = _scale(op, op.Gather(part.a, layer.x, axis=0), slices)
            return op.MatMul(rows, part.b)
        if layer.kind == CONV:
            (part,) = slices
            own = layer.node.attributes
            attributes = {n: own[n].value for n in _CONV_ATTRIBUTES if n in own}
            low_rank = op.Conv(self._input(op, layer.x), part.a, **attributes)
            return op.Conv(_scale(op, low_rank, slices), part.b, group=layer.groups)
        return op.MatMul(
            self._project(op, layer.x, slices), _stack_b_matrices(op, slices, layer.outputs)
        )

    def _project(self, op: OpBuilder, x: ir.Value, slices: Sequence[AdapterSlice]) -> ir.Value:
        """Return ``scaling * x A`` for the concatenated A of all slices."""
        key = x, tuple(p.a for p in slices)
        if key not in self._low_rank:
            matrices = [p.a for p in slices]
            a = matrices[0] if len(matrices) == 1 else op.Concat(*matrices, axis=1)
            self._low_rank[key] = _scale(op, op.MatMul(self._input(op, x), a), slices)
        return self._low_rank[key]

    def _input(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return the input of branches: with Dropout, unless its rate is 0."""
        if not self.dropout:
            return x
        if x not in self._dropped_out:
            ratio = op.const(np.float32(self.dropout))
            self._dropped_out[x] = op.Dropout(x, ratio)
        return self._dropped_out[x]


def _set_missing_types(layer: BaseLayer) -> None:
    """Set the types of a layer's input, output and weight where the file has none, in place."""
    for value in (layer.y, *([] if layer.kind == EMBEDDING else [layer.x])):
        if value.type is None:
            value.type = ir.TensorType(layer.dtype)
    weight = layer.node.inputs[1]
    stored = find_weight(weight) if layer.kind == LINEAR and not layer.node.domain else None
    if stored is not None and stored.value.type is None:
        stored.value.type = ir.TensorType(layer.dtype)
        stored.value.shape = ir.Shape(stored.shape)


def _scale(op: OpBuilder, low_rank: ir.Value, slices: Sequence[AdapterSlice]) -> ir.Value:
    """Multiply ``x A`` by the scaling: it has fewer elements than ``x A B``."""
    if all(p.scaling == 1.0 for p in slices):
        return low_rank
    if all(p.scaling == slices[0].scaling for p in slices):
        return op.Mul(low_rank, slices[0].scaling)
    columns = np.concatenate([np.full(p.rank, p.scaling, np.float32) for p in slices])
    return op.Mul(low_rank, op.const(columns, low_rank.dtype))


def _stack_b_matrices(op: OpBuilder, slices: Sequence[AdapterSlice], outputs: int) -> ir.Value:
    """Concatenate the B matrices along the rank, each padded to all columns of the output."""
    rows = []
    for p in slices:
        b = p.b
        if p.width != p.outputs:
            b = op.Slice(b, [p.column], [p.column + p.width], [1])
        if p.width != outputs:
            b = op.Pad(b, [0, p.start, 0, outputs - p.start - p.width])
        rows.append(b)
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """The adapter to create for a module: rank and scaling; names and shapes follow from them."""

    target: TargetModule
    rank: int
    alpha: float
    rslora: bool
    dora: bool = False
    blocks: bool = False

    @property
    def block(self) -> int:
        """The block size of the quantized weights if they have whole blocks, with ``blocks``."""
        nodes = [s.layer.node for s in self.target.slices]
        if not self.blocks or any(n.op_type != "MatMulNBits" for n in nodes):
            return 0
        sizes = {n.attributes.get_int("block_size", 0) for n in nodes}
        size = sizes.pop()
        return 0 if sizes or self.target.inputs % size else size

    @property
    def scaling(self) -> float:
        """``alpha / rank``, ``alpha / sqrt(rank)`` with rsLoRA, 1 for a rank of 0."""
        if self.rank == 0:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the A and B initializers."""
        kind = "lora_embedding_" if self.target.kind == EMBEDDING else "lora_"
        return f"{self.target.module}.{kind}A", f"{self.target.module}.{kind}B"

    @property
    def magnitude(self) -> str | None:
        """Name of the magnitude initializer, with DoRA."""
        return f"{self.target.module}.lora_magnitude" if self.dora else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B. A rank of 0 is for models whose adapters are inputs."""
        target, rank = self.target, self.rank
        if target.kind == CONV:
            ones = (1,) * len(target.kernel)
            # onnxruntime rejects a kernel without channels, so a rank of 0 becomes zeros.
            rank = rank or target.groups
            return (rank, target.inputs, *target.kernel), (
                target.outputs,
                rank // target.groups,
                *ones,
            )
        return (target.inputs, rank), (rank, target.outputs)


_MAX_RANK = 1 << 20  # far above every layer's size


def hyperparameter_problem(rank: Any, alpha: Any, dropout: Any) -> str | None:
    """Return what is wrong with the settings of an adapter, or ``None``."""
    largest = float(np.finfo(np.float32).max)  # the scaling is a float32 constant
    if not isinstance(rank, int) or isinstance(rank, bool):
        return f"rank must be an integer, got {rank!r:.80}"
    if not 1 <= rank <= _MAX_RANK:
        return f"rank must be at least 1 and at most {_MAX_RANK}, got {rank!r:.80}"
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= largest:
        return f"alpha must be positive and finite in float32, got {alpha!r:.80}"
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        return f"dropout must be in [0, 1), got {dropout!r:.80}"
    return None


def check_ranks(specs: Sequence[AdapterSpec]) -> None:
    """Check that every module can have its adapter.

    Raises:
        PrepareError: if a rank is too large or does not divide by the groups of a convolution, or
            if DoRA does not support a module.
    """
    small = [p for p in specs if p.rank > p.target.max_rank]
    if small:
        listing = ", ".join(
            f"{p.target.module} ({p.target.inputs} -> {p.target.outputs})" for p in small[:4]
        )
        more = f" and {len(small) - 4} more" if len(small) > 4 else ""
        least = min(p.target.max_rank for p in small)
        raise PrepareError(
            f"rank {small[0].rank} is larger than a layer: {listing}{more}\n"
            f"hint: use rank={least}, or remove these layers from `targets`"
        )
    no_dora = [p for p in specs if p.dora and (p.target.kind == EMBEDDING or p.target.groups > 1)]
    if no_dora:
        raise PrepareError(
            f"dora does not support {no_dora[0].target.module}: only linear layers and "
            "convolutions without groups\n"
            "hint: remove it from `targets`, or use dora=False"
        )
    indivisible = [p for p in specs if p.rank % p.target.groups]
    if indivisible:
        target = indivisible[0].target
        raise PrepareError(
            f"rank {indivisible[0].rank} is not a multiple of the {target.groups} groups of "
            f"{target.module}\n"
            "hint: use another rank, or remove grouped convolutions from `targets`"
        )


def attach_adapters(
    model: ir.Model, specs: Sequence[AdapterSpec], start: Mapping[str, np.ndarray], dropout: float
) -> tuple[Adapter, ...]:
    """Add adapters to a model, in place; return a description of each.

    Args:
        model: the model that the target modules were found in.
        specs: the adapters.
        start: initial values of their initializers, by name.
        dropout: dropout probability of the branches' inputs.
    """
    graph = model.graph
    used_names = names_in(graph)
    adapters = []
    slices: dict[BaseLayer, list[AdapterSlice]] = collections.defaultdict(list)
    for spec in specs:
        target = spec.target
        a, b = (_parameter(graph, n, start[n], target.dtype, used_names) for n in spec.names)
        shared = _share_rows(graph, a, spec.block)
        if spec.rank == 0:
            a.shape, b.shape = _dynamic_rank_shapes(target)
        dora: list[ir.Value] = []
        if spec.magnitude is not None:
            squared = weight_norms(target) ** 2
            named = {spec.magnitude: start[spec.magnitude], f"{target.module}.lora_length": squared}
            dora = [_parameter(graph, n, v, target.dtype, used_names) for n, v in named.items()]
        for s in target.slices:
            columns = s.start, s.width, s.column, target.outputs
            slices[s.layer].append(
                AdapterSlice(shared, b, spec.scaling, spec.rank, *columns, *dora)
            )
        adapters.append(_adapter_of(spec, a, b))
    branches = BranchBuilder(graph, dropout)
    for layer, parts in slices.items():
        branches.add(layer, parts)
    model.metadata_props[PARAMETERS] = json.dumps([n for a in adapters for n in a.parameters])
    return tuple(adapters)


def _dynamic_rank_shapes(target: TargetModule) -> tuple[ir.Shape, ir.Shape]:
    """Return shapes of A and B with a symbolic rank."""
    rank = f"lora_rank.{target.module}"
    if target.kind != CONV:
        return ir.Shape([target.inputs, rank]), ir.Shape([rank, target.outputs])
    group_rank = rank if target.groups == 1 else f"{rank}.group"
    ones = (1,) * len(target.kernel)
    return ir.Shape([rank, target.inputs, *target.kernel]), ir.Shape(
        [target.outputs, group_rank, *ones]
    )


def initial_values(specs: Sequence[AdapterSpec], seed: int) -> dict[str, np.ndarray]:
    """Return initial values of each adapter as in PEFT: the product A B is zero."""
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for spec in specs:
        (a, b), (a_shape, b_shape) = spec.names, spec.shapes
        if spec.target.kind == EMBEDDING:
            values[a], values[b] = np.zeros(a_shape), rng.standard_normal(b_shape)
        else:
            # Kaiming uniform with a=sqrt(5), the default of torch.nn.Linear.
            fan_in = spec.target.inputs * math.prod(spec.target.kernel)
            values[a] = rng.uniform(-1.0, 1.0, a_shape) / math.sqrt(fan_in)
            if spec.block:
                values[a] = np.repeat(values[a][:: spec.block], spec.block, axis=0)
            values[b] = np.zeros(b_shape)
        if spec.magnitude is not None:
            values[spec.magnitude] = weight_norms(spec.target)
    return values


def _adapter_of(spec: AdapterSpec, a: ir.Value, b: ir.Value) -> Adapter:
    target = spec.target
    nodes = tuple(s.layer.node.name or "" for s in target.slices)
    sizes = target.inputs, target.outputs, spec.rank, spec.alpha, spec.scaling
    names = a.name or "", b.name or "", spec.magnitude
    return Adapter(target.module, target.kind, nodes, *names, *sizes, spec.block)


def share_rows(a: np.ndarray, block: int) -> np.ndarray:
    """Return A with the mean of each block of rows in all of its rows."""
    if not block:
        return a
    return np.repeat(a.reshape(-1, block, a.shape[1]).mean(1), block, axis=0).astype(a.dtype)


def _share_rows(graph: ir.Graph, a: ir.Value, block: int) -> ir.Value:
    """Return A with the mean of each block of rows in all of its rows, as nodes."""
    if not block:
        return a
    inputs, rank = a.shape or (0, 0)
    first = next(iter(graph))
    op = OpBuilder(graph, f"{a.name}/").before(first)
    rows = op.Reshape(a, op.const([-1, block, rank]))
    means = op.ReduceMean(rows, op.const([1]), keepdims=1)
    return op.Reshape(op.Expand(means, op.const([1, block, 1])), op.const([inputs, rank]))


def _parameter(
    graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType, used_names: set[str]
) -> ir.Value:
    if name in used_names:
        raise PrepareError(
            f"the model already has a tensor {name!r}\n"
            "hint: merge the adapters of the model before you add others"
        )
    used_names.add(name)
    array = array.astype(dtype.numpy())
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(array, dtype, name=name),
    )
    graph.register_initializer(value)
    return value
