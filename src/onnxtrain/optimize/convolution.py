"""Rewrites of convolution and pooling for the CPU.

- `conv_as_matmul`: convolutions of small images become one matmul over the batch.
- `maxpool_indices`: the second output of MaxPool is computed by a second pooling.
- `move_relu_after_maxpool`: `MaxPool(Relu(x)) -> Relu(MaxPool(x))`, on all targets.
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

# Convolutions.


def conv_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Replace forward convolutions of small images with matmuls; return how many.

        before:  Conv(x, W, b)
        after:   im2col(x) W^T + b

    The rows of `im2col(x)` hold what each window reads; the gradient of the weight reads the same
    matrix. Runs after differentiation, because the gradient rule of Conv beats that of the matmul.
    """
    changed = 0
    for node in nodes(op.graph, "Conv"):
        x, w, b = (*node.inputs, None)[:3]
        y = node.outputs[0]
        if x is None or w is None or not w.is_graph_input() or y.is_graph_output():
            continue
        options = S.attributes_of(node, op.opset)
        win = _explicit_windows(options, w)
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
    """Return `im2col(x) W^T + b` in the shape of `y`."""
    outs, positions, n = op.dims(w)[0], op.dims(y)[2:], win.rank
    rows = im2col(op, x, win, taps_first=False)
    product = op.Gemm(rows, op.Reshape(w, [outs, -1]), b, transB=1)
    product = op.Reshape(product, [-1, *positions, outs])
    product = op.Transpose(product, perm=channels_first_perm(n))
    product.type, product.shape = y.type, y.shape
    return product


def _explicit_windows(options: dict[str, Any], w: ir.Value) -> Windows | None:
    """Return the windows of a convolution, unless its padding depends on the size of the image."""
    if w.shape is None or options["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    pads = None if options["auto_pad"] == "VALID" else options["pads"]
    kernel = [d if isinstance(d, int) else None for d in w.shape][2:]
    return window_geometry(
        kernel, strides=options["strides"], dilations=options["dilations"], pads=pads
    )


# Indices of MaxPool.

_MAX_EXACT_FLOAT = 1 << 24  # float32 holds all whole numbers up to here


def maxpool_indices(model: ir.Model, op: OpBuilder) -> int:
    """Compute Indices of MaxPool with windows side by side from its maxima; return how many.

        before:  y, indices = MaxPool(x)
        after:   y = MaxPool(x)
                 rank = (x == Resize(y)) * [area, area - 1, ..., 1]
                 indices = end of the image - MaxPool(rank)

    onnxruntime's fast pooling kernel does not compute Indices. Ranks fall in the order of axes, so
    that the second pooling finds the first of equal maxima, as the operator does.
    """
    order, replaced = list(op.graph), 0
    for node, following in zip(order, [*order[1:], None], strict=True):
        if not _has_indices(node):
            continue
        kernel, image = _tiling_windows(op, node)
        if kernel is None or image is None:
            continue
        indices = _first_maxima(op.before(following), node, kernel, image)
        old = node.outputs[1]
        indices.type, indices.shape = old.type, old.shape
        old.replace_all_uses_with(indices)
        replaced += 1
    return replaced


def _has_indices(node: ir.Node) -> bool:
    if not is_op(node, "MaxPool") or len(node.outputs) < 2:
        return False
    return bool(node.outputs[1].uses()) and not node.outputs[1].is_graph_output()


def _tiling_windows(
    op: OpBuilder, node: ir.Node
) -> tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]:
    """Return the sizes of kernel and image, if windows of float32 lie side by side and fill it."""
    x = node.inputs[0]
    unsupported = None, None
    if x is None or x.dtype != ir.DataType.FLOAT or op.rank(x) != 4:
        return unsupported
    size = D.static_sizes(op.dims(x)[1:])
    options = S.attributes_of(node, op.opset)
    kernel = options["kernel_shape"]
    if size is None or options["strides"] != kernel:
        return unsupported
    if any(options["pads"] or ()) or any(d != 1 for d in options["dilations"] or ()):
        return unsupported
    if options["auto_pad"] != "NOTSET" or options["storage_order"]:
        return unsupported
    (height, width), (rows, columns) = size[1:], kernel
    if height % rows or width % columns or height * width > _MAX_EXACT_FLOAT:
        return unsupported
    return (rows, columns), (height, width)


def _first_maxima(
    op: OpBuilder, node: ir.Node, kernel: tuple[int, int], image: tuple[int, int]
) -> ir.Value:
    """Return the flat position of the first maximum of each window."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    area, (rows, columns) = image[0] * image[1], kernel
    enlarged = op.Resize(
        y,
        None,
        op.const([1.0, 1.0, *map(float, kernel)], ir.DataType.FLOAT),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    enlarged.shape = x.shape
    # Counted from the end of the image, so that the first position has the highest rank.
    rank = area - np.arange(area).reshape(image)
    is_maximum = op.Cast(op.Equal(x, enlarged), to=ir.DataType.FLOAT)
    ranks = op.Mul(is_maximum, op.const(rank, ir.DataType.FLOAT))
    best = op.MaxPool(ranks, kernel_shape=list(kernel), strides=list(kernel))
    # For a window of minus infinities the fast kernel returns the lowest finite float, which equals
    # no element. The first position is right, as always among equals.
    start = op.const(rank[::rows, ::columns], ir.DataType.FLOAT)
    best = op.Where(op.Equal(best, 0.0), start, best)
    channels = op.dims(x)[1]
    assert isinstance(channels, int)
    ends = (np.arange(channels) + 1).reshape(channels, 1, 1) * area
    images = op.Reshape(op.iota(op.size(x, 0)), [-1, 1, 1, 1])
    ends = op.Add(op.Mul(images, channels * area), op.const(ends, ir.DataType.INT64))
    return op.Sub(ends, op.Cast(best, to=ir.DataType.INT64))


# Relu before MaxPool.


def move_relu_after_maxpool(model: ir.Model, op: OpBuilder) -> int:
    """Swap MaxPool with a Relu that only it reads; return how many.

        before:  MaxPool(Relu(x))
        after:   Relu(MaxPool(x))

    Relu is monotonic, so values are equal. So are gradients: a positive maximum is the same
    element, and other elements get zero. After pooling there are fewer elements, forward and
    backward.
    """
    graph, moved = model.graph, 0
    for pool in nodes(graph, "MaxPool"):
        x = pool.inputs[0]
        relu = None if x is None else x.producer()
        if x is None or relu is None or not is_op(relu, "Relu") or relu.graph is not graph:
            continue
        is_used_once = len(x.uses()) == 1 and not x.is_graph_output()
        y = pool.outputs[0]
        if (
            not is_used_once
            or len(pool.outputs) > 1
            or y.is_graph_output()
            or not _reads_elements(pool)
        ):
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


def _reads_elements(pool: ir.Node) -> bool:
    """Return whether every window reads an element; a window of padding alone has no maximum."""
    kernel, pads = (pool.attributes.get(name) for name in ("kernel_shape", "pads"))
    ceil = pool.attributes.get("ceil_mode")
    if kernel is None or (ceil is not None and ceil.as_int()):
        return False
    sizes = list(kernel.as_ints()) * 2
    return pads is None or all(p < k for p, k in zip(pads.as_ints(), sizes, strict=True))
