"""Products with weights of few bits, packed in blocks: they stay packed, forward and backward.

The gradient of the input needs the weights as floats. They are unpacked where they are used: a row
number that depends on the incoming gradient keeps the runtime from unpacking all layers at the
start, for an operator that reads constants only is run as early as possible and its result kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.registry import KEPT, vjp
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.late import late_zero
from onnxtrain.graph.builder.packed_parts import SMALLEST_BLOCK, PackedParts, points_of
from onnxtrain.graph.shapes.dims import Dim

_BITS = (2, 4, 8)  # of a number that kernels unpack
_BIAS = 5  # the place of MatMulNBits' bias


def _packed(node: ir.Node) -> bool:
    """Return whether weights and zero points are constants in the form that rules read."""
    attributes = S.attributes_of(node, 1)
    inputs = [*node.inputs, None, None, None, None]
    points, groups = inputs[3], inputs[4]
    return (
        S.constant_of(inputs[1]) is not None
        and groups is None
        and (points is None or (S.constant_of(points) is not None and _bytes(points)))
        and attributes.get("bits", 4) in _BITS
        and attributes.get("block_size", 0) >= SMALLEST_BLOCK
        and attributes["block_size"].bit_count() == 1
    )


def _bytes(x: ir.Value) -> bool:
    return x.dtype == ir.DataType.UINT8


def _table(node: ir.Node) -> bool:
    data = node.inputs[0]
    attributes = S.attributes_of(node, 1)
    return (
        data is not None
        and _bytes(data)
        and attributes.get("gather_axis", 0) == 0
        and len(S.dims_of(data) or ()) == 2
    )


KEPT["com.microsoft::MatMulNBits"] = _packed
KEPT["com.microsoft::GatherBlockQuantized"] = _table


@vjp(
    "com.microsoft::MatMulNBits",
    constant_inputs={1: "the weights are integers", 3: "the zero points are integers"},
)
def matmul_n_bits(
    op, dy, a, b, scales, points=None, groups=None, bias=None, *, K, N, block_size, bits=4, wanted
):
    """``y = a W^T + bias``, hence ``da = dy W`` and ``dscale = sum of a block(dy^T a (q - z))``."""
    form = _Form(K, N, block_size, bits)
    da = None
    if wanted[0]:
        parts = PackedParts(N, K, block_size, bits, scales.dtype)
        product = chosen(op, parts, INPUT_FORMS, INPUT_CHOICES)
        da = product(op, dy, b, scales, points, parts)
    dscales = None
    if wanted[2]:
        ones = op.ones_like(scales)
        steps = _unpacked(op, b, ones, points, form, dy, whole=True)
        rows = op.Reshape(a, [-1, K]) if op.rank(a) != 2 else a
        dw = op.MatMul(op.mT(op.Reshape(dy, [-1, N]) if op.rank(dy) != 2 else dy), rows)
        missing = form.blocks * block_size - K
        if missing:
            dw = op.Pad(dw, [0, 0, 0, missing])
        each = op.Reshape(op.Mul(dw, steps), [N, form.blocks, block_size])
        dscales = op.reshape_like(op.ReduceSum(each, [2], keepdims=0), scales)
    dbias = None
    if len(wanted) > _BIAS and wanted[_BIAS]:
        dbias = op.sum_to(dy, bias)
    return da, None, dscales, None, None, dbias


def _by_rows(op, dy, b, scales, points, form: PackedParts):
    whole = _Form(form.width, form.rows, form.block, form.bits)
    return op.MatMul(dy, _unpacked(op, b, scales, points, whole, dy))


def _by_parts(op, dy, b, scales, points, form: PackedParts):
    weights = form.weights(op, b, scales, points, wait=dy)
    return form.together(op, form.product_back(op, dy, weights))


INPUT_FORMS: Forms[PackedParts] = {
    "rows": Form(_by_rows),
    "parts": Form(_by_parts, PackedParts.fits),
}
INPUT_CHOICES: Choices[PackedParts] = [Choice("parts", prefers="packed-parts"), Choice("rows")]


class _Form:
    def __init__(self, k: int, n: int, block: int, bits: int) -> None:
        self.k, self.n, self.block, self.bits = k, n, block, bits
        self.blocks = -(-k // block)


def _unpacked(
    op: OpBuilder, b: ir.Value, scales: ir.Value, points: ir.Value | None, form: _Form,
    dy: ir.Value, *, whole: bool = False,
) -> ir.Value:  # fmt: skip
    """Return the weights as floats, [N, K]; ``whole`` keeps what fills the last block up."""
    n, blocks = form.n, form.blocks
    # The operator compares the sizes of scales and zero points before it runs.
    sizes = [n, blocks, 1]
    view = op.Reshape(scales, sizes if points is not None else _unfolded(op, sizes))
    inputs = [b, _late_rows(op, n, dy), view]
    if points is not None:
        inputs.append(op.const(points_of(points, n, blocks, form.bits)[..., None]))
    wide = emit_contrib(
        op, "GatherBlockQuantized", inputs, scales.dtype, [n, blocks, form.block],
        bits=form.bits, block_size=form.block, gather_axis=0, quantize_axis=2,
    )  # fmt: skip
    weight = op.Reshape(wide, [n, blocks * form.block])
    if not whole and blocks * form.block != form.k:
        weight = op.Slice(weight, [0], [form.k], [1])
    return weight


def _unfolded(op: OpBuilder, sizes: list[int]) -> list[int] | ir.Value:
    """Return sizes of a view of a constant such that a runtime does not store the view beside it.

    They take along a zero that depends on the size of an input, so that nothing is constant.
    """
    asked = (x for x in op.graph.inputs if op.dims(x) and op.static(x) is None)
    x = next((x for x in asked if isinstance(op.dims(x)[0], str)), None)
    return sizes if x is None else op.Add(op.const(sizes), late_zero(op, x))


def _late_rows(op: OpBuilder, n: int, dy: ir.Value) -> ir.Value:
    """Return the numbers of all rows, plus a zero that is only known when ``dy`` is."""
    return op.Add(op.iota(n), late_zero(op, dy))


@vjp(
    "com.microsoft::GatherBlockQuantized",
    constant_inputs={0: "the table is integers", 3: "the zero points are integers"},
)
def gather_block_quantized(
    op, dy, data, indices, scales, points=None, *, bits=4, block_size=128, quantize_axis=1, wanted
):
    """``y = (q - z) * scale`` of some rows, hence ``dscale = sum of a block(dy (q - z))``."""
    if not wanted[2]:
        return None, None, None
    inputs = [data, indices, op.ones_like(scales), *([] if points is None else [points])]
    dims = op.dims(dy)
    steps = emit_contrib(
        op, "GatherBlockQuantized", inputs, scales.dtype, dims,
        bits=bits, block_size=block_size, gather_axis=0, quantize_axis=quantize_axis,
    )  # fmt: skip
    each = op.Reshape(op.Mul(dy, steps), [*[0] * (len(dims) - 1), -1, block_size])
    sums = op.ReduceSum(each, [-1], keepdims=0)
    rows = op.Unsqueeze(op.cast(indices, ir.DataType.INT64), [-1])
    return None, None, op.ScatterND(op.zeros_like(scales), rows, sums, reduction="add")


def emit_contrib(
    op: OpBuilder, op_type: str, inputs: Sequence[ir.Value], dtype: ir.DataType | None,
    dims: Sequence[Dim], **attributes: Any,
) -> ir.Value:  # fmt: skip
    """Append one of onnxruntime's own operators, which has no schema to infer its type from."""
    node = ir.Node("com.microsoft", op_type, inputs, ir.convenience.convert_attributes(attributes))
    y = op.append(node)
    assert dtype is not None
    y.type = ir.TensorType(dtype)
    S.set_dims(y, dims)
    return y
