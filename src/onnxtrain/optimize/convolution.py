"""Forward convolutions of small images as products.

``Conv(x, W) + b = columns(x) @ W^T + b``, where a row of ``columns`` holds what a window reads. The
gradient of the weight is a product with the same columns.

Where the maxima of a pooling are, found without MaxPool's second output.

onnxruntime has a fast kernel for pooling on CPUs, but not if Indices are asked for. Where windows
do not overlap, the pooled picture is enlarged again and compared with the input. Positions that
are equal get a number that falls in the order of the axes; a second pooling, of these numbers,
finds the first of them.

Operators that may trade places, put into the order that costs less.

``MaxPool(Relu(x)) = Relu(MaxPool(x))``, as Relu is monotone. The gradients are the same, too: a
positive maximum is the same element, and from others nothing comes back. After the pooling there
are fewer elements to look at, forward and backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows import (
    Windows,
    channels_first_perm,
    conv_shape_of,
    im2col,
    prefers_im2col_matmul,
    window_geometry,
)


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
        if win is None or not prefers_im2col_matmul(
            conv_shape_of(op, x, y, w, win, options["group"])
        ):
            continue
        y.replace_all_uses_with(_im2col_matmul(op.before(node), x, w, b, y, win))
        op.graph.remove(node, safe=True)
        changed += 1
    return changed


def _im2col_matmul(
    op: OpBuilder, x: ir.Value, w: ir.Value, b: ir.Value | None, y: ir.Value, win: Windows
) -> ir.Value:
    """Return ``columns @ W^T + b`` in the shape of ``y``."""
    outs, positions, n = op.dims(w)[0], op.dims(y)[2:], win.rank
    rows = im2col(op, x, win, taps_first=False)
    product = op.Gemm(rows, op.Reshape(w, [outs, -1]), b, transB=1)
    product = op.Reshape(product, [-1, *positions, outs])
    product = op.Transpose(product, perm=channels_first_perm(n))
    product.type, product.shape = y.type, y.shape
    return product


def _windows_of(options: dict[str, Any], w: ir.Value) -> Windows | None:
    """Return the windows of a convolution with explicit padding."""
    if w.shape is None or options["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    pads = None if options["auto_pad"] == "VALID" else options["pads"]
    kernel = [d if isinstance(d, int) else None for d in w.shape][2:]
    return window_geometry(
        kernel, strides=options["strides"], dilations=options["dilations"], pads=pads
    )


_EXACT = 1 << 24
"""Whole numbers up to here are float32."""


def maxpool_indices(model: ir.Model, op: OpBuilder) -> int:
    """Compute Indices by other nodes where that is faster; return how many there were."""
    nodes, replaced = list(op.graph), 0
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        if not _has_indices(node):
            continue
        kernel, picture = _whole_windows(op, node)
        if kernel is None or picture is None:
            continue
        here = op.before(after)
        indices = _first_maxima(here, node, kernel, picture)
        old = node.outputs[1]
        indices.type, indices.shape = old.type, old.shape
        old.replace_all_uses_with(indices)
        replaced += 1
    return replaced


def _has_indices(node: ir.Node) -> bool:
    if not is_op(node, "MaxPool") or len(node.outputs) < 2:
        return False
    return bool(node.outputs[1].uses()) and not node.outputs[1].is_graph_output()


def _whole_windows(
    op: OpBuilder, node: ir.Node
) -> tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]:
    """Return kernel and picture, if windows of float32 numbers lie side by side and fill it."""
    x = node.inputs[0]
    no = None, None
    if x is None or x.dtype != ir.DataType.FLOAT or op.rank(x) != 4:
        return no
    size = D.static_sizes(op.dims(x)[1:])
    options = S.attributes_of(node, op.opset)
    kernel = options["kernel_shape"]
    if size is None or options["strides"] != kernel:
        return no
    if any(options["pads"] or ()) or any(d != 1 for d in options["dilations"] or ()):
        return no
    if options["auto_pad"] != "NOTSET" or options["storage_order"]:
        return no
    (height, width), (rows, columns) = size[1:], kernel
    if height % rows or width % columns or height * width > _EXACT:
        return no
    return (rows, columns), (height, width)


def _first_maxima(
    op: OpBuilder, node: ir.Node, kernel: tuple[int, int], picture: tuple[int, int]
) -> ir.Value:
    """Return the flat position of the first maximum of each window."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    area, (rows, columns) = picture[0] * picture[1], kernel
    enlarged = op.Resize(
        y,
        None,
        op.const([1.0, 1.0, *map(float, kernel)], ir.DataType.FLOAT),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    enlarged.shape = x.shape
    # Counted from the end of the picture, so that the first position has the largest number.
    number = area - np.arange(area).reshape(picture)
    equal = op.Cast(op.Equal(x, enlarged), to=ir.DataType.FLOAT)
    numbers = op.Mul(equal, op.const(number, ir.DataType.FLOAT))
    best = op.MaxPool(numbers, kernel_shape=list(kernel), strides=list(kernel))
    # The fast kernel makes the least finite number of a window of minus infinities. Their first
    # one is it, as always among equals.
    start = op.const(number[::rows, ::columns], ir.DataType.FLOAT)
    best = op.Where(op.Equal(best, 0.0), start, best)
    channels = op.dims(x)[1]
    assert isinstance(channels, int)
    ends = (np.arange(channels) + 1).reshape(channels, 1, 1) * area
    images = op.Reshape(op.iota(op.size(x, 0)), [-1, 1, 1, 1])
    ends = op.Add(op.Mul(images, channels * area), op.const(ends, ir.DataType.INT64))
    return op.Sub(ends, op.Cast(best, to=ir.DataType.INT64))


def move_relu_after_maxpool(model: ir.Model, op: OpBuilder) -> int:
    """Put pooling by maximum in front of a Relu that nothing else reads; return how many moved."""
    graph, moved = model.graph, 0
    for pool in nodes(graph, "MaxPool"):
        x = pool.inputs[0]
        relu = None if x is None else x.producer()
        if x is None or relu is None or not is_op(relu, "Relu") or relu.graph is not graph:
            continue
        alone = len(x.uses()) == 1 and not x.is_graph_output()
        y = pool.outputs[0]
        if not alone or len(pool.outputs) > 1 or y.is_graph_output() or not _reads_input(pool):
            continue
        source = relu.inputs[0]
        assert source is not None
        readers = list(y.uses())
        pool.replace_input_with(0, source)
        after = ir.node("Relu", [y], name=f"{y.name}/relu")
        z = after.outputs[0]
        z.name, z.type = f"{y.name}/relu", y.type
        S.set_dims(z, S.dims_of(y) or ())
        for node, index in readers:
            node.replace_input_with(index, z)
        graph.remove(relu, safe=True)
        graph.insert_after(pool, [after])
        moved += 1
    return moved


def _reads_input(pool: ir.Node) -> bool:
    """Return whether every window reads more than padding, whose maximum is no element's."""
    kernel, pads = (pool.attributes.get(name) for name in ("kernel_shape", "pads"))
    ceil = pool.attributes.get("ceil_mode")
    if kernel is None or (ceil is not None and ceil.as_int()):
        return False
    sizes = list(kernel.as_ints()) * 2
    return pads is None or all(p < k for p, k in zip(pads.as_ints(), sizes, strict=True))
