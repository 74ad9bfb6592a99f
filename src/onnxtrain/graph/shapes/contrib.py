"""Type and shape inference for onnxruntime's quantized operators (domain com.microsoft)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.symbolic import WINDOW_FORMULAS, dims_in, input_of
from onnxtrain.graph.shapes.values import set_dims

Typed = tuple[ir.DataType | None, Sequence[Dim] | None]
"""Type and shape of an output; ``None`` if unknown."""


def infer_contrib(node: ir.Node) -> bool:
    """Infer a quantized operator of onnxruntime; return ``False`` for any other node."""
    formula = _FORMULAS.get(node.op_type) if node.domain == RUNTIME_DOMAIN else None
    if formula is None:
        return False
    for y, (dtype, dims) in zip(node.outputs, formula(node), strict=False):
        if dtype is not None:
            y.type = ir.TensorType(dtype)
        if dims is not None:
            set_dims(y, dims)
    return True


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _dtype(node: ir.Node, i: int) -> ir.DataType | None:
    x = input_of(node, i)
    return None if x is None else x.dtype


def _matmul_n_bits(node: ir.Node) -> list[Typed]:
    dims = dims_in(node, 0)
    width = _int(node, "N", 0)
    return [(_dtype(node, 0), None if dims is None else [*dims[:-1], width])]


def _gather_block_quantized(node: ir.Node) -> list[Typed]:
    data, indices = dims_in(node, 0), dims_in(node, 1)
    dims = None
    if data is not None and indices is not None:
        axis = _int(node, "gather_axis", 0) % len(data)
        packed = _dtype(node, 0) == ir.DataType.UINT8
        per_byte = 8 // _int(node, "bits", 4) if packed else 1
        dims = [*data[:axis], *indices, *data[axis + 1 : -1], D.mul(data[-1], per_byte)]
    return [(_dtype(node, 2), dims)]


def _same_as_input(i: int) -> Callable[[ir.Node], list[Typed]]:
    return lambda node: [(_dtype(node, i), dims_in(node, i))]


def _quantize(node: ir.Node) -> list[Typed]:
    return [(_dtype(node, 2) or ir.DataType.UINT8, dims_in(node, 0))]


def _dequantize(node: ir.Node) -> list[Typed]:
    return [(_dtype(node, 1), dims_in(node, 0))]


def _broadcast(first: int, *others: int) -> Callable[[ir.Node], list[Typed]]:
    """Return the formula for inputs that broadcast, with the dtype of the first of them."""

    def infer(node: ir.Node) -> list[Typed]:
        dims: Sequence[Dim] | None = dims_in(node, first)
        for i in others:
            other = dims_in(node, i)
            dims = None if dims is None or other is None else D.broadcast_shapes(dims, other)
        return [(_dtype(node, first), dims)]

    return infer


def _concat(node: ir.Node) -> list[Typed]:
    """Infer QLinearConcat: inputs 0 and 1 are the output's scale and zero point."""
    # Each tensor is followed by its scale and zero point.
    parts = [dims_in(node, i) for i in range(2, len(node.inputs), 3)]
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
    dims = dims_in(node, 0)
    if dims is not None:
        ones = [1] * (len(dims) - 2)
        last = _int(node, "channels_last", 0)
        dims = [dims[0], *ones, dims[-1]] if last else [*dims[:2], *ones]
    return [(_dtype(node, 0), dims)]


def _pool(node: ir.Node) -> list[Typed]:
    dims = dims_in(node, 0)
    if dims is not None and _int(node, "channels_last", 0):
        dims = [dims[0], *[None] * (len(dims) - 2), dims[-1]]
    elif dims is not None:
        attributes = {n: a.value for n, a in node.attributes.items()}
        dims = WINDOW_FORMULAS["AveragePool"](node, attributes)
    return [(_dtype(node, 0), dims)]


def _conv(node: ir.Node) -> list[Typed]:
    """Infer QLinearConv, whose weight is input 3; the spatial sizes stay unknown."""
    dims, kernel = dims_in(node, 0), dims_in(node, 3)
    if dims is not None:
        channels = None if kernel is None else kernel[0]
        inner = [None] * (len(dims) - 2)
        last = _int(node, "channels_last", 0)
        dims = [dims[0], *inner, channels] if last else [dims[0], channels, *inner]
    return [(_dtype(node, 7), dims)]


def _gemm(node: ir.Node) -> list[Typed]:
    """Infer QGemm of inputs 0 and 3; the output is quantized if it has a scale (input 7)."""
    a, b = dims_in(node, 0), dims_in(node, 3)
    dims = None
    if a is not None and b is not None:
        rows, columns = a[1 if _int(node, "transA", 0) else 0], b[_int(node, "transB", 0) - 1]
        dims = [rows, columns]
    scaled = _dtype(node, 7) is not None
    return [((_dtype(node, 8) or ir.DataType.UINT8) if scaled else _dtype(node, 1), dims)]


def _matmul_integer(scale: int) -> Callable[[ir.Node], list[Typed]]:
    """Return the formula for an integer matmul whose output has the dtype of input ``scale``."""

    def infer(node: ir.Node) -> list[Typed]:
        a, b = dims_in(node, 0), dims_in(node, 1)
        dims = None
        if a is not None and b is not None and len(b) == 2 and len(a) >= 2:
            dims = [*a[:-1], b[-1]]
        return [(_dtype(node, scale), dims)]

    return infer


def _dynamic_lstm(node: ir.Node) -> list[Typed]:
    """Infer DynamicQuantizeLSTM: all hidden states, the last hidden state, the last cell state."""
    x = dims_in(node, 0)
    length, batch = (None, None) if x is None or len(x) != 3 else x[:2]
    direction = node.attributes.get("direction")
    bidirectional = direction is not None and direction.as_string() == "bidirectional"
    hidden = _int(node, "hidden_size", 0) or None
    last: list[Dim] = [2 if bidirectional else 1, batch, hidden]
    return [(_dtype(node, 0), [length, *last]), (_dtype(node, 0), last), (_dtype(node, 0), last)]


_FORMULAS: dict[str, Callable[[ir.Node], list[Typed]]] = {
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
