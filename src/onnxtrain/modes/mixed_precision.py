"""Mixed precision: float32 parameters, 16-bit matmuls, and the opsets that 16-bit kernels need.

``upcast_to_float32`` makes a 16-bit model float32 for training. A float16 update below 1/4000 of a
weight is lost, and most updates are smaller, so parameters, optimizer state and all computation
are float32. Exports have the types of the file again. Frozen weights stay 16-bit and are cast
where they are read.

``autocast`` then casts the operands of matmuls and convolutions to 16 bits and their results back.
Differentiation carries the same types through the backward pass, because the gradient of Cast is
Cast. It has two forms:

* Targets with 16-bit kernels multiply in 16 bits, and so do the operators that only move the
  results.
* Other targets round operands and results to 16 bits and multiply in float32. That is what a
  16-bit kernel with float32 accumulation computes. onnxruntime's CPU provider has no bfloat16
  matmul, and its float16 matmul runs in float32 without rounding.

``upgrade_for_bfloat16_conv``: Conv takes bfloat16 since opset 22. A model has one opset, so all
its operators are raised together; if the runtime lacks a kernel of the new version for one of
them, the model keeps its opset and float32 convolutions. MaxPool, which most nets contain, is
expanded instead.

At the end: marks on values that hold the derivative of an activation (so that passes need not
recognize them), and ``upgrade_opset``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.conv import can_decompose_max_pool
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard, nodes, subgraphs_of
from onnxtrain.graph.windows import nearest_repeats
from onnxtrain.targets import Target, find

_UPCAST_TYPE = ir.DataType.FLOAT
HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SMALL = 1 << 12
"""Constants of up to this many elements are converted at build time."""
_TYPES = ("to", "dtype", "output_dtype")


def upcast_to_float32(
    model: ir.Model, trained: Collection[str], *, target: str | Target
) -> list[str]:
    """Make a 16-bit model compute in float32, in place; return a line for the report, if any.

    Graph inputs keep their types; outputs become float32.

    Args:
        model: a prepared model.
        trained: names of the initializers that become float32 themselves.
        target: target that the graph is generated for.
    """
    names = sorted({v.dtype.name.lower() for v in _values(model.graph) if _is_half(v) and v.dtype})
    if not names:
        return []
    op = OpBuilder(model.graph, "wide/", target=target)
    upcast_count = 0
    for name, x in list(model.graph.initializers.items()):
        if not _is_half(x):
            continue
        upcast_count += name in trained
        if name in trained or op.target.lacks("float16") or _becomes_constant(x):
            _convert(x)
        else:
            _cast_output(op, x)
    for x in list(model.graph.inputs):
        if _is_half(x):
            _cast_output(op, x)
    kept = {*model.graph.inputs, *model.graph.initializers.values()}
    for value in _values(model.graph):
        if value in kept:
            continue
        if value.const_value is not None and value.const_value.dtype in HALF_TYPES:
            _convert(value)
        elif value.type is not None:
            value.type = _upcast_type(value.type)
    for node in model.graph.all_nodes():
        _upcast_attributes(node)
    what = " and ".join(names)
    return [f"{upcast_count} {what} parameter(s) are float32 in training; exports keep {what}"]


def _is_half(x: ir.Value) -> bool:
    return x.dtype in HALF_TYPES


def _becomes_constant(x: ir.Value) -> bool:
    """Return whether a frozen weight is small, or read by an operator that needs constants."""
    if x.const_value is None or x.const_value.size <= _SMALL:
        return True
    return any(not is_standard(u.node) or u.node.op_type == "DequantizeLinear" for u in x.uses())


def _convert(x: ir.Value) -> None:
    assert x.const_value is not None
    array = np.asarray(x.const_value.numpy()).astype(np.float32)
    x.const_value = ir.Tensor(array, _UPCAST_TYPE, name=x.name)
    x.type = ir.TensorType(_UPCAST_TYPE)


def _cast_output(op: OpBuilder, x: ir.Value) -> None:
    """Insert a Cast to float32 in front of all readers of a value."""
    uses = list(x.uses())
    if not uses and not x.is_graph_output():
        return
    first = next(iter(op.graph), None)
    wide = (op if first is None else op.before(first)).Cast(x, to=_UPCAST_TYPE)
    wide.type, wide.shape = ir.TensorType(_UPCAST_TYPE), x.shape
    for use in uses:
        use.node.replace_input_with(use.idx, wide)


def _upcast_attributes(node: ir.Node) -> None:
    """Change dtype attributes and tensor attributes from 16 bits to float32."""
    if node.op_type == "Cast" and _is_half_input(node):
        return
    for name in _TYPES:
        attribute = node.attributes.get(name)
        if attribute is not None and not attribute.is_ref() and attribute.value in HALF_TYPES:
            node.attributes[name] = ir.AttrInt64(name, _UPCAST_TYPE.value)
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            tensor = attribute.as_tensor()
            if tensor.dtype in HALF_TYPES:
                wide = ir.Tensor(tensor.numpy().astype(np.float32), _UPCAST_TYPE, name=tensor.name)
                node.attributes[name] = ir.AttrTensor(name, wide)


def _is_half_input(cast: ir.Node) -> bool:
    x = cast.inputs[0]
    return x is not None and _is_half(x)


def _upcast_type(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(_UPCAST_TYPE) if kind.dtype in HALF_TYPES else kind
    if isinstance(kind, ir.SequenceType):
        return ir.SequenceType(_upcast_type(kind.elem_type))
    if isinstance(kind, ir.OptionalType):
        return ir.OptionalType(_upcast_type(kind.elem_type))
    return kind


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Return all values of a graph and its subgraphs."""
    pending: list[ir.Graph] = [graph]
    while pending:
        at = pending.pop()
        yield from at.inputs
        yield from at.initializers.values()
        for node in at:
            yield from node.outputs
            pending += subgraphs_of(node)


BFLOAT16_CONV_OPSET = 22
_BFLOAT16 = ir.DataType.BFLOAT16
# Operators that opset 22 changes and whose new version CUDA supports.
_UPGRADABLE_CONV_OPS = frozenset(
    {
        *("AveragePool", "Conv", "ConvTranspose", "Cos", "GlobalAveragePool", "GlobalMaxPool"),
        *("HardSigmoid", "HardSwish", "Mish", "Round", "Sin", "Softplus", "Softsign"),
    }
)
_MATMUL_OPS = ("Einsum", "Gemm", "MatMul")
_MANY_CONVS = 8
_WORK_RATIO = 2


def upgrade_for_bfloat16_conv(model: ir.Model, half: ir.DataType, target: Target) -> bool:
    """Raise the opset of a model so that Conv can be bfloat16, in place; return whether it can.

    Only for models that consist mostly of convolutions; elsewhere matmuls dominate.
    """
    if half != _BFLOAT16 or not target.prefers("bfloat16-conv"):
        return False
    if not _mostly_convolutions(model.graph):
        return False
    old = model.opset_imports[""]
    if old < BFLOAT16_CONV_OPSET:
        if not all(_is_upgradable(n, old) for n in model.graph.all_nodes()):
            return False
        model.opset_imports[""] = BFLOAT16_CONV_OPSET
    return True


def _mostly_convolutions(graph: ir.Graph) -> bool:
    """Return whether convolutions outnumber matmuls or, if there are many, do most of the work.

    Nets with attention between convolutions have many small matmuls.
    """
    convolutions, others = nodes(graph, "Conv"), nodes(graph, *_MATMUL_OPS)
    if len(convolutions) > len(others):
        return True
    return len(convolutions) >= _MANY_CONVS and _count_multiplications(
        convolutions
    ) > _WORK_RATIO * _count_multiplications(others)


def _count_multiplications(products: list[ir.Node]) -> int:
    """Return the approximate number of multiplications."""
    return sum(_elements(S.dims_of(n.outputs[0])) * _reduction_size(n) for n in products)


def _reduction_size(node: ir.Node) -> int:
    """Return the number of multiplications per output element."""
    first, weight = (None if x is None else S.dims_of(x) for x in node.inputs[:2])
    if node.op_type == "Conv":
        return _elements((weight or ())[1:])
    turned = node.attributes.get("transA")
    rows_first = turned is not None and bool(turned.as_int())
    return _elements((first or ())[:1] if rows_first else (first or ())[-1:])


def _elements(dims: Sequence[object] | None) -> int:
    """Return the product of sizes; symbolic sizes count as 1."""
    return math.prod(d for d in dims or () if isinstance(d, int))


def _is_upgradable(node: ir.Node, opset: int) -> bool:
    """Return whether a node also runs at opset 22."""
    if not is_standard(node) or node.op_type in _UPGRADABLE_CONV_OPS:
        return True
    if node.op_type == "MaxPool":
        return can_decompose_max_pool(node, opset)
    old, new = (S.schema_of(node.op_type, v) for v in (opset, BFLOAT16_CONV_OPSET))
    return old is not None and new is not None and old.since_version == new.since_version


FLOAT, BFLOAT16, FLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16

LOWER_PRECISION_OPS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
# Before opset 22 the other operators have no bfloat16 and stay float32; see
# upgrade_for_bfloat16_conv for models whose convolutions become bfloat16, too.
_NATIVE_OPS = {FLOAT16: LOWER_PRECISION_OPS, BFLOAT16: frozenset({"Gemm", "MatMul"})}
# Layout operators and Relu commute with casts, and so do their gradients.
_LAYOUT_OPS = frozenset(
    {"Flatten", "Identity", "Relu", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Elementwise operators on matmul results. Kernels compute them in float32 internally, so only their
# outputs are rounded. Not for float16, whose range is smaller than that of float32.
_DTYPE_PRESERVING_OPS = frozenset(
    {"Add", "Div", "Gelu", "Mul", "Neg", "Sigmoid", "Softmax", "Sub", "Tanh", "Where"}
)
# Operators on images. Scale, bias and statistics of normalizations stay float32.
_IMAGE_OPS = frozenset(
    {
        *("BatchNormalization", "Concat", "GroupNormalization", "HardSigmoid", "HardSwish"),
        *("MaxPool", "Resize"),
    }
)
_DTYPE_PRESERVING_OPS_BY_TYPE = {BFLOAT16: _DTYPE_PRESERVING_OPS, FLOAT16: frozenset[str]()}


def autocast(model: ir.Model, half: ir.DataType, *, target: str | Target) -> int:
    """Compute the matmuls and convolutions of a model in 16 bits, in place; return their number.

    Args:
        model: a prepared model before differentiation; its outputs keep their names.
        half: ``BFLOAT16`` or ``FLOAT16``.
        target: target that the graph is generated for.
    """
    images = upgrade_for_bfloat16_conv(model, half, find(target))
    root = OpBuilder(model.graph, "half/", target=target)
    kind = _NativeAutocast if root.target.prefers("float16-matmul") else _EmulatedAutocast
    graphs: list[ir.Graph] = [model.graph]
    for node in model.graph.all_nodes():
        graphs += subgraphs_of(node)
    passes = [kind(root, graph, half) for graph in graphs]
    passes[0].images = images
    return sum(p.run() for p in passes)


class _AutocastPass:
    """One pass over one graph; casts are inserted next to the node that needs them."""

    def __init__(self, root: OpBuilder, graph: ir.Graph, half: ir.DataType) -> None:
        self.root, self.graph, self.half = root, graph, half
        self.cast: dict[ir.Value, ir.Value] = {}
        """The 16-bit (or rounded) version of each float32 operand."""
        self.count = 0
        self.images = False
        """Whether convolutions and the operators between them become 16-bit, too."""

    def run(self) -> int:
        nodes = list(self.graph)
        for node, after in zip(nodes, [*nodes[1:], None], strict=True):
            if is_standard(node):
                self.visit(node, after)
        return self.count

    def visit(self, node: ir.Node, after: ir.Node | None) -> None:
        raise NotImplementedError

    def builder(self, before: ir.Node | None) -> OpBuilder:
        parent = None if self.graph is self.root.graph else self.root
        if parent is None and before is None:
            return self.root
        return OpBuilder(
            self.graph, self.root.prefix, target=self.root.target, before=before, parent=self.root
        )

    def is_bias(self, add: ir.Node, product: ir.Value) -> ir.Value | None:
        """Return the other operand of an Add if it is a bias: an initializer of rank 0 or 1."""
        (a, b) = add.inputs
        other = b if a is product else a
        if other is None or not other.is_initializer() or other.dtype != FLOAT:
            return None
        dims = S.dims_of(other)
        return other if dims is not None and len(dims) <= 1 else None

    def replace(
        self, y: ir.Value, after: ir.Node | None, through: tuple[ir.DataType, ...]
    ) -> ir.Value:
        """Append casts to a value; the last one takes over its name and readers."""
        op, new = self.builder(after), y
        kind, shape, name = ir.TensorType(FLOAT), y.shape, y.name
        uses = list(y.uses())
        for dtype in through:
            new = op.Cast(new, to=dtype)
            new.shape = shape
        new.type = kind
        for use in uses:
            use.node.replace_input_with(use.idx, new)
        if y.is_graph_output():
            graph = y.graph
            assert graph is not None
            for i, out in enumerate(graph.outputs):
                if out is y:
                    graph.outputs[i] = new
        y.name = self.root.names.fresh(f"{name}.{self.half.name.lower()}")
        new.name = name
        return new


class _EmulatedAutocast(_AutocastPass):
    """Round operands and results to 16 bits; multiply in float32."""

    def visit(self, node: ir.Node, after: ir.Node | None) -> None:
        if node.op_type not in LOWER_PRECISION_OPS or node.outputs[0].dtype != FLOAT:
            return
        self.count += 1
        for i, x in enumerate(node.inputs):
            if x is not None and x.dtype == FLOAT:
                node.replace_input_with(i, self.rounded(x, node))
        y = node.outputs[0]
        uses = list(y.uses())
        follower = uses[0].node if len(uses) == 1 and not y.is_graph_output() else None
        if follower is not None and follower.op_type == "Add" and follower.graph is self.graph:
            bias = self.is_bias(follower, y)
            if bias is not None:  # a linear layer: round once, after the bias
                at = list(follower.inputs).index(bias)
                follower.replace_input_with(at, self.rounded(bias, follower))
                self.replace(follower.outputs[0], _next(follower), (self.half, FLOAT))
                return
        self.replace(y, after, (self.half, FLOAT))

    def rounded(self, x: ir.Value, before: ir.Node) -> ir.Value:
        if x not in self.cast:
            op = self.builder(before)
            self.cast[x] = op.Cast(op.Cast(x, to=self.half), to=FLOAT)
        return self.cast[x]


class _NativeAutocast(_AutocastPass):
    """Multiply in 16 bits."""

    def __init__(self, root: OpBuilder, graph: ir.Graph, half: ir.DataType) -> None:
        super().__init__(root, graph, half)
        self.made: dict[ir.Value, ir.Value] = {}
        """float32 values that are casts of 16-bit values, with those values."""
        self.parts: set[ir.Node] = set()
        """Gathers that together split a value."""

    def visit(self, node: ir.Node, after: ir.Node | None) -> None:
        if not node.outputs or any(y.dtype != FLOAT for y in node.outputs):
            return
        operands = [i for i, x in enumerate(node.inputs) if x is not None and x.dtype == FLOAT]
        outputs = list(node.outputs)
        if self.images and node.op_type == "Conv":
            self.count += 1
        elif self.images and node.op_type in _IMAGE_OPS:
            operands, outputs = self.image_operands(node), outputs[:1]
            if not operands or not all(node.inputs[i] in self.made for i in operands):
                return
        elif node.op_type in _NATIVE_OPS[self.half]:
            self.count += 1
        elif node.op_type in _LAYOUT_OPS or self.is_part(node):
            if node.inputs[0] not in self.made:
                return
            operands = [0]
        elif not self.follows(node) and (node.op_type != "Add" or not self.adds_bias(node)):
            return
        for i in operands:
            x = node.inputs[i]
            assert x is not None
            node.replace_input_with(i, self.narrow(x, node))
        for y in outputs:
            y.type = ir.TensorType(self.half)
            self.made[self.replace(y, after, (FLOAT,))] = y

    def image_operands(self, node: ir.Node) -> list[int]:
        """Return the indices of image inputs: all of a Concat, else the first."""
        if node.op_type == "Concat":
            return list(range(len(node.inputs)))
        training = node.attributes.get("training_mode")
        if node.op_type == "BatchNormalization" and (training is None or not training.as_int()):
            return []  # no kernel in inference mode
        if node.op_type == "Resize" and nearest_repeats(node, self.root.opset) is None:
            return []
        return [0]

    def is_part(self, node: ir.Node) -> bool:
        """Return whether a Gather is one of several that split a value, such as q, k and v.

        Their joint gradient is a Concat. That of other Gathers is a sum, which needs float32.
        """
        if node not in self.parts:
            self.parts |= _siblings(node)
        return node in self.parts

    def follows(self, node: ir.Node) -> bool:
        """Return whether a node reads 16-bit values only, apart from scalars and masks."""
        if node.op_type not in _DTYPE_PRESERVING_OPS_BY_TYPE[self.half]:
            return False
        operands = [x for x in node.inputs if x is not None and x.dtype == FLOAT]
        narrow = [x for x in operands if x in self.made]
        rest = [x for x in operands if x not in self.made]
        if node.op_type == "Where":  # the fill value of masked scores may overflow
            return bool(narrow) and all(_is_zero(x) for x in rest)
        return bool(narrow) and all(
            _is_scalar(x) or _is_mask(x, node) or (self.images and _is_per_channel(x, node))
            for x in rest
        )

    def adds_bias(self, node: ir.Node) -> bool:
        return any(x in self.made and self.is_bias(node, x) is not None for x in node.inputs if x)

    def narrow(self, x: ir.Value, before: ir.Node) -> ir.Value:
        if x in self.made:
            return self.made[x]
        if x not in self.cast:
            op, number = self.builder(before), S.constant_of(x)
            ours = number is not None and number.size == 1 and S.is_generated_constant(x)
            self.cast[x] = op.const(number, self.half) if ours else op.Cast(x, to=self.half)
        return self.cast[x]


def _siblings(node: ir.Node) -> set[ir.Node]:
    """Return the Gathers of the same value, if together they read each of its slices once."""
    x = node.inputs[0] if node.op_type == "Gather" else None
    dims = None if x is None else S.dims_of(x)
    if x is None or dims is None:
        return set()
    places: set[tuple[int, int]] = set()
    readers = list(x.uses())
    for use in readers:
        at = S.constant_of(use.node.inputs[1]) if use.node.op_type == "Gather" else None
        if at is None or at.shape != () or use.idx != 0:
            return set()
        axis = use.node.attributes.get("axis")
        axis = (0 if axis is None else axis.as_int()) % len(dims)
        size = dims[axis]
        if not isinstance(size, int) or size != len(readers):
            return set()
        places.add((axis, int(at) % size))
    whole = len(places) == len(readers) and len({axis for axis, _ in places}) == 1
    return {use.node for use in readers} if whole else set()


def _is_scalar(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1


def _is_zero(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1 and array.item() == 0.0


def _is_mask(x: ir.Value, node: ir.Node) -> bool:
    """Return whether an operand of an Add is an attention mask."""
    sizes, whole = S.dims_of(x), S.dims_of(node.outputs[0])
    if node.op_type != "Add" or sizes is None or whole is None or len(sizes) < 2:
        return False
    if x.is_initializer() and S.constant_of(x) is None:
        return False
    # As large as the scores, and broadcast over the heads at least.
    return sizes[-2:] == whole[-2:] and 1 in (*[1] * (len(whole) - len(sizes)), *sizes[:-2])


def _is_per_channel(x: ir.Value, node: ir.Node) -> bool:
    """Return whether an operand is constant over the positions of a channel."""
    sizes, whole = S.dims_of(x), S.dims_of(node.outputs[0])
    if node.op_type not in ("Add", "Mul", "Sub") or sizes is None or whole is None:
        return False
    positions = len(whole) - 2
    return positions > 0 and len(sizes) > positions and set(sizes[-positions:]) == {1}


def _next(node: ir.Node) -> ir.Node | None:
    assert node.graph is not None
    nodes = list(node.graph)
    at = nodes.index(node)
    return nodes[at + 1] if at + 1 < len(nodes) else None


_DERIVATIVE_KEY = "onnxtrain.derivative"  # in Value.meta

GELU_TANH_DERIVATIVE = "derivative of tanh Gelu"
TWICE_GELU_DERIVATIVE = "twice the derivative of Gelu"


def mark_derivative(y: ir.Value, kind: str) -> ir.Value:
    """Mark a value as an activation's derivative; return the value."""
    y.meta[_DERIVATIVE_KEY] = kind
    return y


def derivative_kind(y: ir.Value) -> str | None:
    """Return the kind of derivative that a value is marked as, if any."""
    return y.meta.get(_DERIVATIVE_KEY)


ATTENTION_OPSET = 23
"""The first opset with an Attention operator."""
_IR_VERSION = 11
# Operators that opsets 22 and 23 change without changing their meaning, and whose new version CUDA
# supports.
_UPGRADABLE_OPS = frozenset(
    {
        *("AveragePool", "Cast", "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "Flatten"),
        *("GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "Mish", "Pad", "Reshape"),
        *("Round", "Shape", "Sin", "Size", "Softplus", "Squeeze", "Transpose", "Unsqueeze"),
    }
)


def can_upgrade_opset(model: ir.Model, opset: int) -> bool:
    """Return whether all nodes of a model keep their meaning and their kernels at a newer opset."""
    old = model.opset_imports[""]
    return old >= opset or all(_is_same(n, old, opset) for n in model.graph.all_nodes())


def upgrade_opset(model: ir.Model, opset: int) -> None:
    """Raise the opset of a model, in place."""
    if model.opset_imports[""] < opset:
        model.opset_imports[""] = opset
        model.ir_version = max(model.ir_version or 0, _IR_VERSION)


def _is_same(node: ir.Node, old: int, new: int) -> bool:
    if not is_standard(node) or node.op_type in _UPGRADABLE_OPS:
        return True
    before, after = (S.schema_of(node.op_type, v) for v in (old, new))
    return before is not None and after is not None and before.since_version == after.since_version
