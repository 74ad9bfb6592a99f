"""Layers with frozen weights that a low-rank branch can be put beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.adapters.modules.module_names import is_builders, module_name, weight_module
from onnxtrain.adapters.modules.operand import operand
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, key_of

LINEAR, EMBEDDING, CONV = "linear", "embedding", "conv"
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns of a layer's output that are a module of their own."""

    module: str
    start: int
    width: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """A node with frozen weights, and the modules that its output consists of."""

    node: ir.Node
    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    module: str
    parts: tuple[Part, ...]
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
class _Shape:
    kind: str
    inputs: int
    outputs: int
    weights: tuple[ir.Value, ...]
    joined: tuple[tuple[ir.Value, int], ...] = ()
    kernel: tuple[int, ...] = ()
    groups: int = 1


def layers_of(graph: ir.Graph) -> list[Layer]:
    """Return every layer of the graph that can have a branch, in order."""
    layers = []
    for node in graph:
        read = _READERS.get(key_of(node))
        shape = None if read is None else read(node)
        if shape is not None:
            layers.append(_layer(node, shape))
    return layers


def _layer(node: ir.Node, shape: _Shape) -> Layer:
    module = module_name(node, shape.weights, shared=_is_shared(shape))
    return Layer(
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


def _is_shared(shape: _Shape) -> bool:
    """Return whether a product reads the table of an embedding."""
    return shape.kind == LINEAR and any(
        use.node.op_type in ("Gather", "GatherBlockQuantized") for use in shape.weights[0].uses()
    )


def _parts(node: ir.Node, module: str, shape: _Shape) -> list[Part]:
    """Return the modules side by side in the output of a layer."""
    whole = [Part(module, 0, shape.outputs)]
    if shape.joined:
        parts, at = [], 0
        for weight, width in shape.joined:
            parts.append(Part(weight_module(weight), at, width))
            at += width
        return parts
    stem, _, last = module.rpartition(".")
    if shape.kind != LINEAR or last != "qkv_proj" or not is_builders(shape.weights):
        return whole
    widths = _packed_widths(node.outputs[0])
    if widths is None or sum(widths) != shape.outputs:
        return whole
    starts = (0, widths[0], widths[0] + widths[1])
    return [
        Part(f"{stem}.{name}", at, width)
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
            sizes = _numbers(node.inputs[1]) if len(node.inputs) > 1 else None
            if sizes is not None and len(sizes) == 3:
                return sizes[0], sizes[1], sizes[2]
    return None


def _numbers(value: ir.Value | None) -> list[int] | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(n) for n in tensor.numpy().reshape(-1)]


def _by_heads(node: ir.Node, y: ir.Value) -> tuple[int, int, int] | None:
    queries = node.attributes.get_int("num_heads", 0)
    keys = node.attributes.get_int("kv_num_heads", 0)
    dims = S.dims_of(y)
    width = dims[-1] if dims else None
    if not isinstance(width, int):
        width = _width_behind(y)
    if not queries or not keys or not isinstance(width, int) or width % (queries + 2 * keys):
        return None
    head = width // (queries + 2 * keys)
    return queries * head, keys * head, keys * head


def _width_behind(y: ir.Value) -> int | None:
    """Return the outputs of the layer that a value comes from, through a bias."""
    node = y.producer()
    while node is not None and is_op(node, "Add", "Cast"):
        first = node.inputs[0]
        node = None if first is None else first.producer()
    read = None if node is None else _READERS.get(key_of(node))
    shape = None if read is None or node is None else read(node)
    return None if shape is None else shape.outputs


def _matmul(node: ir.Node) -> _Shape | None:
    weight = operand(node.inputs[1])
    if weight is None or len(weight.shape) != 2 or operand(node.inputs[0]) is not None:
        return None
    k, n = weight.shape
    return _Shape(LINEAR, k, n, weight.stored, weight.joined)


def _gemm(node: ir.Node) -> _Shape | None:
    if node.attributes.get_int("transA", 0) or operand(node.inputs[0]) is not None:
        return None
    turned = node.attributes.get_int("transB", 0)
    weight = operand(node.inputs[1], 0 if turned else 1)
    if weight is None or len(weight.shape) != 2:
        return None
    k, n = reversed(weight.shape) if turned else weight.shape
    return _Shape(LINEAR, k, n, weight.stored, weight.joined)


def _packed_product(node: ir.Node) -> _Shape | None:
    weight = operand(node.inputs[1])
    sizes = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
    if weight is None or not all(sizes) or not node.attributes.get_int("transB", 1):
        return None
    return _Shape(LINEAR, *sizes, weight.stored)


def _gather(node: ir.Node) -> _Shape | None:
    table, rows = operand(node.inputs[0]), node.inputs[1]
    if table is None or len(table.shape) != 2 or min(table.shape) < 2 or rows is None:
        return None
    if node.attributes.get_int("axis", 0) or operand(rows) is not None or not _is_float(node):
        return None
    return _Shape(EMBEDDING, *table.shape, table.stored)


def _packed_gather(node: ir.Node) -> _Shape | None:
    table = operand(node.inputs[0])
    if table is None or len(table.shape) != 2 or node.attributes.get_int("gather_axis", 0):
        return None
    rows, width = table.shape
    if table.stored[0].dtype == ir.DataType.UINT8:
        width = width * 8 // node.attributes.get_int("bits", 4)
    return _Shape(EMBEDDING, rows, width, table.stored)


def _conv(node: ir.Node) -> _Shape | None:
    kernel = operand(node.inputs[1], 0)
    if kernel is None or len(kernel.shape) < 3:
        return None
    n, k, *window = kernel.shape
    groups = node.attributes.get_int("group", 1)
    return _Shape(CONV, k * groups, n, kernel.stored, kernel=tuple(window), groups=groups)


def _is_float(node: ir.Node) -> bool:
    table = node.inputs[0]
    maker = None if table is None else table.producer()
    return maker is not None or (table is not None and S.is_float(table))


_READERS: dict[str, Callable[[ir.Node], _Shape | None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Gather": _gather,
    "com.microsoft::MatMulNBits": _packed_product,
    "com.microsoft::MatMulBnb4": _packed_product,
    "com.microsoft::GatherBlockQuantized": _packed_gather,
}

__all__ = ["CONV", "EMBEDDING", "LINEAR", "Layer", "Part", "layers_of"]
