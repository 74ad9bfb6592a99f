"""Mixed precision: products in 16 bits, everything else in float32.

Parameters stay float32. What a product reads is cast to 16 bits in front of it, what it gives is
cast back behind it, so that the gradient of Cast carries the reverse sweep through the same types.

There are two forms. Where a runtime prefers 16-bit kernels, products run in 16 bits,
and so does what only moves their results about. Elsewhere the operands and the result are rounded
to 16 bits and the product itself is float32, which is what 16-bit kernels with float32 sums
compute: onnxruntime's CPU has no bfloat16 products, and computes float16 ones in float32 without
any rounding.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.modes.half_images import raise_for_images
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.windows.repeated_positions import repeats
from onnxtrain.targets import Target, find

FLOAT, BFLOAT16, FLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
# Before opset 22 the other operators know no bfloat16: they stay in float32 there. Of nets that can
# be raised to it, see half_images.py, convolutions are 16 bits as well.
_NATIVE_PRODUCTS = {FLOAT16: PRODUCTS, BFLOAT16: frozenset({"Gemm", "MatMul"})}
# Moving values about commutes with casts, as Relu does, and so do the gradients of these.
_MOVES = frozenset(
    {"Flatten", "Identity", "Relu", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Passes over results of products, which kernels compute in float32 inside: only what they write is
# rounded. bfloat16 has the range of float32, float16 has not: there they stay in float32.
_FOLLOW = frozenset(
    {"Add", "Div", "Gelu", "Mul", "Neg", "Sigmoid", "Softmax", "Sub", "Tanh", "Where"}
)
# Passes over images. Of normalisations scale, shift and statistics stay in float32.
_IMAGES = frozenset(
    {
        *("BatchNormalization", "Concat", "GroupNormalization", "HardSigmoid", "HardSwish"),
        *("MaxPool", "Resize"),
    }
)
_FOLLOWERS = {BFLOAT16: _FOLLOW, FLOAT16: frozenset[str]()}


def autocast(model: ir.Model, half: ir.DataType, *, target: str | Target) -> int:
    """Compute the products of a model in 16 bits, in place; return how many there are.

    Args:
        model: a prepared model, not differentiated yet; names of its outputs stay.
        half: ``BFLOAT16`` or ``FLOAT16``.
        target: where it will run.
    """
    images = raise_for_images(model, half, find(target))
    root = OpBuilder(model.graph, "half/", target=target)
    kind = _Native if root.target.prefers("float16-products") else _Rounded
    graphs: list[ir.Graph] = [model.graph]
    for node in model.graph.all_nodes():
        graphs += subgraphs_of(node)
    passes = [kind(root, graph, half) for graph in graphs]
    passes[0].images = images
    return sum(p.run() for p in passes)


class _Pass:
    """Goes through one graph; what it inserts stands directly before or behind a node."""

    def __init__(self, root: OpBuilder, graph: ir.Graph, half: ir.DataType) -> None:
        self.root, self.graph, self.half = root, graph, half
        self.cast: dict[ir.Value, ir.Value] = {}
        """What stands for a float32 value as the operand of a product."""
        self.count = 0
        self.images = False
        """Whether convolutions, and what lies between them, are 16 bits too."""

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
        """Return the other operand of an Add, if it is a vector of weights."""
        (a, b) = add.inputs
        other = b if a is product else a
        if other is None or not other.is_initializer() or other.dtype != FLOAT:
            return None
        dims = S.dims_of(other)
        return other if dims is not None and len(dims) <= 1 else None

    def replace(
        self, y: ir.Value, after: ir.Node | None, through: tuple[ir.DataType, ...]
    ) -> ir.Value:
        """Put casts behind a value; return the last one, which has its name and place."""
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


class _Rounded(_Pass):
    """Rounds operands and results, multiplies in float32."""

    def visit(self, node: ir.Node, after: ir.Node | None) -> None:
        if node.op_type not in PRODUCTS or node.outputs[0].dtype != FLOAT:
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
            if bias is not None:  # a linear layer: one rounding, after the sum
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


class _Native(_Pass):
    """Multiplies in 16 bits."""

    def __init__(self, root: OpBuilder, graph: ir.Graph, half: ir.DataType) -> None:
        super().__init__(root, graph, half)
        self.made: dict[ir.Value, ir.Value] = {}
        """float32 values that are casts of 16-bit ones, with these."""
        self.parts: set[ir.Node] = set()
        """Each one of several Gathers that cut a value up."""

    def visit(self, node: ir.Node, after: ir.Node | None) -> None:
        if not node.outputs or any(y.dtype != FLOAT for y in node.outputs):
            return
        operands = [i for i, x in enumerate(node.inputs) if x is not None and x.dtype == FLOAT]
        outputs = list(node.outputs)
        if self.images and node.op_type == "Conv":
            self.count += 1
        elif self.images and node.op_type in _IMAGES:
            operands, outputs = self.image_operands(node), outputs[:1]
            if not operands or not all(node.inputs[i] in self.made for i in operands):
                return
        elif node.op_type in _NATIVE_PRODUCTS[self.half]:
            self.count += 1
        elif node.op_type in _MOVES or self.is_part(node):
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
        """Return which inputs are images: all of a Concat, else the first; others are numbers."""
        if node.op_type == "Concat":
            return list(range(len(node.inputs)))
        training = node.attributes.get("training_mode")
        if node.op_type == "BatchNormalization" and (training is None or not training.as_int()):
            return []  # of given statistics there is no such kernel
        if node.op_type == "Resize" and repeats(node, self.root.opset) is None:
            return []
        return [0]

    def is_part(self, node: ir.Node) -> bool:
        """Return whether a Gather is one of several that cut a value up, as that of q, k and v.

        The gradient of all together is a Concat; that of others adds up, which wants float32.
        """
        if node not in self.parts:
            self.parts |= _siblings(node)
        return node in self.parts

    def follows(self, node: ir.Node) -> bool:
        """Return whether all that a pass reads is 16 bits already, but for numbers and masks."""
        if node.op_type not in _FOLLOWERS[self.half]:
            return False
        operands = [x for x in node.inputs if x is not None and x.dtype == FLOAT]
        narrow = [x for x in operands if x in self.made]
        rest = [x for x in operands if x not in self.made]
        if node.op_type == "Where":  # a large number that hides scores may become an infinity
            return bool(narrow) and all(_is_zero(x) for x in rest)
        return bool(narrow) and all(
            _is_number(x) or _is_mask(x, node) or (self.images and _is_per_channel(x, node))
            for x in rest
        )

    def adds_bias(self, node: ir.Node) -> bool:
        return any(x in self.made and self.is_bias(node, x) is not None for x in node.inputs if x)

    def narrow(self, x: ir.Value, before: ir.Node) -> ir.Value:
        if x in self.made:
            return self.made[x]
        if x not in self.cast:
            op, number = self.builder(before), S.constant_of(x)
            ours = number is not None and number.size == 1 and S.is_own_constant(x)
            self.cast[x] = op.const(number, self.half) if ours else op.Cast(x, to=self.half)
        return self.cast[x]


def _siblings(node: ir.Node) -> set[ir.Node]:
    """Return the Gathers that read the same as one, if together they read all of it once."""
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


def _is_number(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1


def _is_zero(x: ir.Value) -> bool:
    array = S.constant_of(x)
    return array is not None and array.size == 1 and array.item() == 0.0


def _is_mask(x: ir.Value, node: ir.Node) -> bool:
    """Return whether an operand of a sum is spread over more than the axes in front of it."""
    sizes, whole = S.dims_of(x), S.dims_of(node.outputs[0])
    if node.op_type != "Add" or sizes is None or whole is None or len(sizes) < 2:
        return False
    if x.is_initializer() and S.constant_of(x) is None:
        return False
    # As wide as the scores, and the same for all heads at least.
    return sizes[-2:] == whole[-2:] and 1 in (*[1] * (len(whole) - len(sizes)), *sizes[:-2])


def _is_per_channel(x: ir.Value, node: ir.Node) -> bool:
    """Return whether an operand has one number for all positions of an image, or of a channel."""
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
