"""Pooling by maximum, and its partial inverse.

Of equal maxima in a window the first one, in the order of the axes, gets the gradient, as in torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv.conv import input_gradient
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size
from onnxtrain.graph.modes.half_images import IMAGES_OPSET
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows.composed_max_pool import can_be_composed
from onnxtrain.graph.windows.geometry import (
    Windows,
    crop_like,
    fixed_padding,
    pad,
    pad_at_run_time,
    same_pads,
    tap_slices,
    windows,
)

_EXACT = 1 << 24
"""Whole numbers up to here are float32."""


@vjp("MaxPool")
def max_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    node: ir.Node,
    auto_pad: str,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    storage_order: int,
    strides: list[int] | None,
) -> Gradients:
    """Send ``dy`` to where the maximum was."""
    win = windows(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    fixed = fixed_padding(op, x, y, win, auto_pad)
    pooling = _Pooling(
        *(x, y, node, win, fixed, auto_pad),
        by_columns=storage_order != 0,
        composed=op.opset >= IMAGES_OPSET and can_be_composed(node, op.opset),
    )
    return chosen(op, pooling, POOLING_FORMS, POOLING_CHOICES)(op, dy, pooling)


@dataclasses.dataclass(frozen=True)
class _Pooling:
    """A MaxPool node."""

    x: ir.Value
    y: ir.Value
    node: ir.Node
    win: Windows
    fixed: Windows | None
    """The windows with explicit padding, if it is known."""
    auto_pad: str
    by_columns: bool
    """Whether the node's indices count column by column."""
    composed: bool = False
    """Whether the node will be written with others, which give no indices."""

    def indices(self, op: OpBuilder) -> ir.Value:
        """Return the flat positions of the maxima, row by row."""
        if not self.by_columns:
            return op.extra_output(self.node, 1)
        kept = {k: v.value for k, v in self.node.attributes.items() if k != "storage_order"}
        return op.MaxPool(self.x, _outputs=2, **kept)[1]


def _by_scatter(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """``dx[index[w]] = sum of dy[w]`` over the windows w, on zeros, flattened."""
    return op.reshape_like(_scatter(op, dy, pooling.indices(op), pooling.x), pooling.x)


def _by_places(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """Scatter to the first maxima, which comparisons find tap by tap, the last one first."""
    x, y, win = pooling.x, pooling.y, pooling.fixed
    sizes, counts = _sizes(x), _sizes(y)
    assert win is not None
    # As rows, so that no slice of the forward pass is kept for here.
    rows = op.Reshape(x, [-1, 1, *sizes[2:]])
    maxima = op.cast(op.Reshape(y, [-1, 1, *counts[2:]]), ir.DataType.FLOAT)
    taps = tap_slices(op, pad(op, rows, win, float("-inf")), win, like=y)
    places = [op.const(p, ir.DataType.FLOAT) for p in _places(win, sizes[2:], counts[2:])]
    place = places[-1]
    for tap, here in reversed(list(zip(taps, places, strict=True))):
        match = op.Equal(op.cast(tap, ir.DataType.FLOAT), maxima)
        place = op.Where(match, here, place)
    images = np.arange(sizes[0] * sizes[1]) * int(np.prod(sizes[2:]))
    starts = op.const(images.reshape(-1, *[1] * (win.rank + 1)), ir.DataType.INT64)
    indices = op.Add(op.Cast(place, to=ir.DataType.INT64), starts)
    return op.reshape_like(_scatter(op, dy, indices, x), x)


def _places(win: Windows, sizes: Sequence[int], counts: Sequence[int]) -> list[np.ndarray]:
    """Return, for each tap, the flat position that each window reads; the nearest one if outside.

    What is outside is never the maximum, unless a window has none that is finite.
    """
    tables = []
    for tap in win.taps():
        flat: np.ndarray = np.zeros((), np.int64)
        for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            at = np.arange(count) * win.strides[i] - win.before[i] + tap[i]
            flat = flat[..., None] * size + np.clip(at, 0, size - 1)
        tables.append(flat)
    return tables


def _sizes(x: ir.Value) -> list[int]:
    sizes = D.numbers(S.dims_of(x) or (None,))
    assert sizes is not None
    return sizes


def _has_places(pooling: _Pooling) -> bool:
    """Return whether all sizes are known, and positions in an image are float32."""
    sizes, counts = (D.numbers(S.dims_of(v) or (None,)) for v in (pooling.x, pooling.y))
    if sizes is None or counts is None or pooling.fixed is None:
        return False
    return pooling.win.static_kernel is not None and int(np.prod(sizes[2:])) <= _EXACT


def _by_unpooling(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """MaxUnpool puts each value to one place: for windows that do not overlap."""
    assert pooling.fixed is not None
    return op.MaxUnpool(
        dy,
        pooling.indices(op),
        kernel_shape=_unpooling_kernel(pooling.x, pooling.y, pooling.fixed),
        pads=[*pooling.fixed.before, *[0] * pooling.win.rank],
        strides=pooling.win.strides,
    )


def _unpooling_kernel(x: ir.Value, y: ir.Value, win: Windows) -> list[int] | None:
    """Return the kernel with which MaxUnpool makes an output of the size of ``x``.

    ``None`` if windows overlap, as MaxUnpool does not add, or if sizes are not known.
    """
    if any(s < (win.extent(i) or 0) for i, s in enumerate(win.strides)):
        return None
    sizes, counts = D.numbers((S.dims_of(x) or ())[2:]), D.numbers((S.dims_of(y) or ())[2:])
    if sizes is None or counts is None:
        return None
    return [
        size + before - (count - 1) * stride
        for size, count, stride, before in zip(sizes, counts, win.strides, win.before, strict=True)
    ]


def _scatter(op: OpBuilder, dy: ir.Value, indices: ir.Value, x: ir.Value) -> ir.Value:
    """Add ``dy`` up at flat positions of a tensor as large as ``x``."""
    assert x.dtype is not None
    flat = op.full(_vector(op, _size(op, x)), 0.0, x.dtype)
    updates = op.Reshape(dy, [-1])
    return op.ScatterElements(flat, op.Reshape(indices, [-1]), updates, axis=0, reduction="add")


def _by_first_match(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """Compare what the windows read with their maxima, tap by tap; the first match takes ``dy``."""
    x, y, win, fixed = pooling.x, pooling.y, pooling.win, pooling.fixed
    if x.dtype == ir.DataType.BFLOAT16:  # CUDA compares none
        dy, x, y = (op.cast(v, ir.DataType.FLOAT) for v in (dy, x, y))
        dx = _by_first_match(op, dy, dataclasses.replace(pooling, x=x, y=y))
        return op.cast(dx, ir.DataType.BFLOAT16)
    rows = op.reshape(x, [-1, 1, *(op.size(x, a) for a in win.axes)])
    # Equal to no maximum, so never matched.
    lowest = -65504.0 if x.dtype == ir.DataType.FLOAT16 else -3.4e38
    if fixed is not None:
        image, before = pad(op, rows, _reaching(op, rows, y, fixed), lowest), None
    else:
        before, after = same_pads(op, x, y, win, upper=pooling.auto_pad == "SAME_UPPER")
        image = pad_at_run_time(op, rows, before, after, lowest)
    sizes = [op.size(y, a) for a in win.axes]
    maxima, dy = op.reshape(y, [-1, 1, *sizes]), op.reshape(dy, [-1, 1, *sizes])
    free, taken = None, []
    for tap in tap_slices(op, image, win, like=y):
        match = op.Cast(op.Equal(tap, maxima), to=x.dtype)
        first = match if free is None else op.Mul(match, free)
        free = op.Sub(1.0, match) if free is None else op.Sub(free, first)
        taken.append(first)
    parts = op.Mul(taken[0] if len(taken) == 1 else op.Concat(*taken, axis=1), dy)
    kernel = np.eye(len(taken)).reshape(len(taken), 1, *(win.static_kernel or ()))
    place = op.const(kernel, x.dtype)
    if fixed is not None:
        dx = input_gradient(op, parts, place, rows, fixed)
    else:
        assert before is not None
        dx = crop_like(op, input_gradient(op, parts, place, image, win), before, rows)
    return op.reshape_like(dx, x)


def _reaching(op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows) -> Windows:
    """Return windows with padding up to where the last one ends, which ceil_mode lets hang over."""
    after = []
    for i, (size, count) in enumerate(zip(op.dims(x)[2:], op.dims(y)[2:], strict=True)):
        stride, extent = win.strides[i], win.extent(i)
        assert extent is not None
        if isinstance(size, int) and isinstance(count, int):
            needed = stride * (count - 1) + extent - win.before[i] - size
            after.append(max(needed, 0))
        else:
            after.append(win.after[i] + stride - 1)
    return windows(win.kernel, win.strides, win.dilations, [*win.before, *after])


def _unpools(pooling: _Pooling) -> bool:
    """Return whether MaxUnpool, of which there is one for float32, makes the size of the input."""
    if pooling.x.dtype != ir.DataType.FLOAT or pooling.fixed is None:
        return False
    return _unpooling_kernel(pooling.x, pooling.y, pooling.fixed) is not None


POOLING_FORMS: Forms[_Pooling] = {
    "scatter": Form(_by_scatter),
    "unpool": Form(_by_unpooling, _unpools),
    "first_match": Form(_by_first_match),
    "places": Form(_by_places, _has_places),
}
POOLING_CHOICES: Choices[_Pooling] = [
    Choice("first_match", lacks="MaxPool.Indices"),
    Choice("places", lambda p: p.composed, lacks="MaxPool.opset22"),
    Choice("first_match", lambda p: p.composed, lacks="MaxPool.opset22"),
    Choice("scatter", lacks="MaxUnpool"),
    Choice("unpool"),
    Choice("scatter"),
]


@vjp("GlobalMaxPool")
def global_max_pool(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """Send ``dy`` to where the maximum was."""
    rows = op.Reshape(x, [0, 0, -1])
    where = op.ArgMax(rows, axis=2, keepdims=1)
    hit = op.Equal(op.iota(op.size(rows, 2)), where)
    dx = op.Where(hit, op.Reshape(dy, [0, 0, 1]), 0.0)
    return op.reshape_like(dx, x)


@vjp("MaxUnpool")
def max_unpool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    indices: ir.Value,
    output_shape: ir.Value | None = None,
    *,
    kernel_shape: list[int],
    strides: list[int] | None,
) -> Gradients:
    """Read ``dy`` where x was put.

    Indices are positions in the flattened output, as onnxruntime takes them. Where windows overlap,
    several elements may go to one place: the last one stays there, and gets the gradient.
    """
    dx = op.Gather(op.Reshape(dy, [-1]), indices)
    steps = strides or [1] * len(kernel_shape)
    if all(s >= k for s, k in zip(steps, kernel_shape, strict=True)):
        return dx
    flat = op.Reshape(indices, [-1])
    number = op.iota(_size(op, indices))
    nobody = op.full(_vector(op, _size(op, dy)), -1, ir.DataType.INT64)
    last = op.ScatterElements(nobody, flat, number, axis=0, reduction="max")
    stays = op.Equal(op.Gather(last, indices), op.reshape_like(number, indices))
    return op.Where(stays, dx, 0.0)


def _size(op: OpBuilder, x: ir.Value) -> Size:
    """Return the number of elements."""
    static = op.static(x)
    return op.Reshape(op.Size(x), [1]) if static is None else int(np.prod(static))


def _vector(op: OpBuilder, size: Size) -> ir.Value:
    return op.const([size]) if isinstance(size, int) else size
