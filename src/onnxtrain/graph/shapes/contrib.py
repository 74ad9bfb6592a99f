"""Types and shapes of onnxruntime's own operators that stay in a graph: quantised ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.symbolic import WINDOW_FORMULAS
from onnxtrain.graph.shapes.values import dims_of, set_dims

Typed = tuple[ir.DataType | None, Sequence[Dim] | None]
"""Type and shape of an output, as far as they are known."""


def infer_contrib(node: ir.Node) -> bool:
    """Set the types of a node's outputs; return whether it is one of the operators known here."""
    rule = _RULES.get(node.op_type) if node.domain == "com.microsoft" else None
    if rule is None:
        return False
    for y, (dtype, dims) in zip(node.outputs, rule(node), strict=False):
        if dtype is not None:
            y.type = ir.TensorType(dtype)
        if dims is not None:
            set_dims(y, dims)
    return True


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _dims(node: ir.Node, i: int) -> tuple[Dim, ...] | None:
    x = node.inputs[i] if i < len(node.inputs) else None
    return None if x is None else dims_of(x)


def _dtype(node: ir.Node, i: int) -> ir.DataType | None:
    x = node.inputs[i] if i < len(node.inputs) else None
    return None if x is None else x.dtype


def _matmul_n_bits(node: ir.Node) -> list[Typed]:
    dims = _dims(node, 0)
    width = _int(node, "N", 0)
    return [(_dtype(node, 0), None if dims is None else [*dims[:-1], width])]


def _gather_block_quantized(node: ir.Node) -> list[Typed]:
    data, indices = _dims(node, 0), _dims(node, 1)
    dims = None
    if data is not None and indices is not None:
        axis = _int(node, "gather_axis", 0) % len(data)
        packed = _dtype(node, 0) == ir.DataType.UINT8
        each = 8 // _int(node, "bits", 4) if packed else 1
        dims = [*data[:axis], *indices, *data[axis + 1 : -1], D.mul(data[-1], each)]
    return [(_dtype(node, 2), dims)]


def _same_as_input(i: int) -> Callable[[ir.Node], list[Typed]]:
    return lambda node: [(_dtype(node, i), _dims(node, i))]


def _quantize(node: ir.Node) -> list[Typed]:
    return [(_dtype(node, 2) or ir.DataType.UINT8, _dims(node, 0))]


def _dequantize(node: ir.Node) -> list[Typed]:
    return [(_dtype(node, 1), _dims(node, 0))]


def _broadcast(first: int, *others: int) -> Callable[[ir.Node], list[Typed]]:
    """Return the inference of what some inputs broadcast to, of the type of the first."""

    def infer(node: ir.Node) -> list[Typed]:
        dims = _dims(node, first)
        for i in others:
            dims = _broadcast_dims(dims, _dims(node, i))
        return [(_dtype(node, first), dims)]

    return infer


def _broadcast_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> tuple[Dim, ...] | None:
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    left, right = ((1,) * (rank - len(t)) + tuple(t) for t in (a, b))
    return tuple(D.broadcast(p, q) for p, q in zip(left, right, strict=True))


def _concat(node: ir.Node) -> list[Typed]:
    """Return tensors behind each other; scale and zero point of the result come first."""
    parts = [_dims(node, i) for i in range(2, len(node.inputs), 3)]
    known = [p for p in parts if p is not None]
    dims = None
    if known and len(known) == len(parts):
        axis = _int(node, "axis", 0) % len(known[0])
        total: Dim = 0
        for part in known:
            total = D.add(total, part[axis])
        dims = [*known[0][:axis], total, *known[0][axis + 1 :]]
    return [(_dtype(node, 2), dims)]


def _global_pool(node: ir.Node) -> list[Typed]:
    dims = _dims(node, 0)
    if dims is not None:
        ones = [1] * (len(dims) - 2)
        last = _int(node, "channels_last", 0)
        dims = [dims[0], *ones, dims[-1]] if last else [*dims[:2], *ones]
    return [(_dtype(node, 0), dims)]


def _pool(node: ir.Node) -> list[Typed]:
    dims = _dims(node, 0)
    if dims is not None and _int(node, "channels_last", 0):
        dims = [dims[0], *[None] * (len(dims) - 2), dims[-1]]
    elif dims is not None:
        attributes = {n: a.value for n, a in node.attributes.items()}
        dims = WINDOW_FORMULAS["AveragePool"](node, attributes)
    return [(_dtype(node, 0), dims)]


def _conv(node: ir.Node) -> list[Typed]:
    """Return a convolution, whose kernel is input 3; how many windows it has is left open."""
    dims, kernel = _dims(node, 0), _dims(node, 3)
    if dims is not None:
        channels = None if kernel is None else kernel[0]
        inner = [None] * (len(dims) - 2)
        last = _int(node, "channels_last", 0)
        dims = [dims[0], *inner, channels] if last else [dims[0], channels, *inner]
    return [(_dtype(node, 7), dims)]


def _gemm(node: ir.Node) -> list[Typed]:
    """Return a product of inputs 0 and 3, quantised if the result has a scale."""
    a, b = _dims(node, 0), _dims(node, 3)
    dims = None
    if a is not None and b is not None:
        rows, columns = a[1 if _int(node, "transA", 0) else 0], b[_int(node, "transB", 0) - 1]
        dims = [rows, columns]
    scaled = _dtype(node, 7) is not None
    return [((_dtype(node, 8) or ir.DataType.UINT8) if scaled else _dtype(node, 1), dims)]


def _matmul_integer(scale: int) -> Callable[[ir.Node], list[Typed]]:
    """Return the inference of a product of inputs 0 and 1 whose type is that of a scale."""

    def infer(node: ir.Node) -> list[Typed]:
        a, b = _dims(node, 0), _dims(node, 1)
        dims = None
        if a is not None and b is not None and len(b) == 2 and len(a) >= 2:
            dims = [*a[:-1], b[-1]]
        return [(_dtype(node, scale), dims)]

    return infer


def _dynamic_lstm(node: ir.Node) -> list[Typed]:
    """Return the outputs of an LSTM: all states, the last one and the last cell."""
    x = _dims(node, 0)
    length, batch = (None, None) if x is None or len(x) != 3 else x[:2]
    direction = node.attributes.get("direction")
    ways = 2 if direction is not None and direction.as_string() == "bidirectional" else 1
    hidden = _int(node, "hidden_size", 0) or None
    last: list[Dim] = [ways, batch, hidden]
    return [(_dtype(node, 0), [length, *last]), (_dtype(node, 0), last), (_dtype(node, 0), last)]


_RULES: dict[str, Callable[[ir.Node], list[Typed]]] = {
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLSTM": _dynamic_lstm,
    "DynamicQuantizeMatMul": _matmul_integer(2),
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulIntegerToFloat": _matmul_integer(2),
    "MatMulNBits": _matmul_n_bits,
    "QGemm": _gemm,
    "QLinearAdd": _broadcast(0, 3),
    "QLinearAveragePool": _pool,
    "QLinearConcat": _concat,
    "QLinearConv": _conv,
    "QLinearGlobalAveragePool": _global_pool,
    "QLinearLeakyRelu": _same_as_input(0),
    "QLinearMul": _broadcast(0, 3),
    "QLinearSigmoid": _same_as_input(0),
    "QLinearSoftmax": _same_as_input(0),
    "QLinearWhere": _broadcast(1, 4, 0),
    "QuantizeLinear": _quantize,
}
