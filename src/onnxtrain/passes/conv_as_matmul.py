"""Forward convolutions of small images as products.

``Conv(x, W) + b = columns(x) @ W^T + b``, where a row of ``columns`` holds what a window reads. The
gradient of the weight is a product with the same columns.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.windows.columns import by_product, channels_second, columns
from onnxtrain.graph.windows.conv_shape import facts_of
from onnxtrain.graph.windows.geometry import Windows, windows


def conv_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Turn forward convolutions of small images by a parameter into products; return how many."""
    changed = 0
    for node in nodes(op.graph, "Conv"):
        x, w, b = (*node.inputs, None)[:3]
        y = node.outputs[0]
        if x is None or w is None or not w.is_graph_input() or y.is_graph_output():
            continue
        options = S.attributes_of(node, op.opset)
        win = _windows_of(options, w)
        if win is None or not by_product(facts_of(op, x, y, w, win, options["group"])):
            continue
        y.replace_all_uses_with(_product_of(op.before(node), x, w, b, y, win))
        op.graph.remove(node, safe=True)
        changed += 1
    return changed


def _product_of(
    op: OpBuilder, x: ir.Value, w: ir.Value, b: ir.Value | None, y: ir.Value, win: Windows
) -> ir.Value:
    """Return ``columns @ W^T + b`` in the shape of ``y``."""
    outs, positions, n = op.dims(w)[0], op.dims(y)[2:], win.rank
    rows = columns(op, x, win, by_tap=False)
    product = op.Gemm(rows, op.Reshape(w, [outs, -1]), b, transB=1)
    product = op.Reshape(product, [-1, *positions, outs])
    product = op.Transpose(product, perm=channels_second(n))
    product.type, product.shape = y.type, y.shape
    return product


def _windows_of(options: dict[str, Any], w: ir.Value) -> Windows | None:
    """Return the windows of a convolution with explicit padding."""
    if w.shape is None or options["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    pads = None if options["auto_pad"] == "VALID" else options["pads"]
    kernel = [d if isinstance(d, int) else None for d in w.shape][2:]
    return windows(kernel, strides=options["strides"], dilations=options["dilations"], pads=pads)
