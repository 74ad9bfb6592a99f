"""Sliding windows: geometry of convolution and pooling, im2col, nearest-neighbor Resize.

Along each spatial axis, output position ``o`` of a window reads input positions
``o * stride - before + t * dilation`` for taps ``t`` of the kernel. :class:`Windows` holds that
geometry; the functions after it pad, slice and crop images accordingly.

:class:`ConvShape` holds the sizes that decide how to lower a convolution and its gradients.
:func:`im2col` turns a convolution into one matmul over the whole batch. onnxruntime's convolution
kernel runs image by image and reads the whole weight for each. For images of a few positions that
is most of its time; the matmul reads the weight once.

:func:`repeat_nearest` covers Resize nodes that repeat each position an integer number of times.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

_END = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Windows:
    """Kernel, strides, dilations and explicit padding, one entry per spatial axis."""

    kernel: tuple[Dim, ...]
    """Kernel sizes; entries that are not integers are unknown until run time."""
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.strides)

    @property
    def axes(self) -> list[int]:
        """The spatial axes of a tensor [batch, channels, ...]."""
        return list(range(2, 2 + self.rank))

    @property
    def pads(self) -> list[int]:
        """The ``pads`` attribute."""
        return [*self.before, *self.after]

    @property
    def static_kernel(self) -> tuple[int, ...] | None:
        """The kernel size if it is static, else ``None``."""
        sizes = tuple(k for k in self.kernel if isinstance(k, int))
        return sizes if len(sizes) == self.rank else None

    @property
    def count(self) -> int | None:
        """Number of taps if the kernel is static, else ``None``."""
        return None if self.static_kernel is None else int(np.prod(self.static_kernel))

    def extent(self, i: int) -> int | None:
        """Number of input positions a window spans along axis ``i``, dilation included."""
        k = self.kernel[i]
        return (k - 1) * self.dilations[i] + 1 if isinstance(k, int) else None

    def taps(self) -> Iterator[tuple[int, ...]]:
        """Yield the offsets of the taps, last axis fastest."""
        assert self.static_kernel is not None
        return itertools.product(
            *(range(0, k * d, d) for k, d in zip(self.static_kernel, self.dilations, strict=True))
        )

    def unpadded(self) -> Windows:
        """Return the same windows without padding, for an input that is already padded."""
        return dataclasses.replace(self, before=(0,) * self.rank, after=(0,) * self.rank)


def window_geometry(
    kernel: Sequence[Dim],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> Windows:
    """Return the window geometry of a node from its attributes."""
    n = len(kernel)
    pads = pads or [0] * (2 * n)
    return Windows(
        tuple(kernel),
        tuple(strides or [1] * n),
        tuple(dilations or [1] * n),
        tuple(pads[:n]),
        tuple(pads[n:]),
    )


def pad(op: OpBuilder, x: ir.Value, win: Windows, value: float = 0.0) -> ir.Value:
    """Pad the spatial axes of ``x``.

    The Pad lists all axes. onnxruntime-web fails on a Pad with an `axes` input when its layout
    optimizer pushes a Transpose through it, as happens before a 1-D Conv on a GPU.
    """
    if not any(win.pads):
        return x
    amounts = [0, 0, *win.before, 0, 0, *win.after]
    if x.dtype == ir.DataType.BFLOAT16 and op.target.lacks("Pad.bfloat16"):
        return _pad_bfloat16(op, x, amounts, value)
    return op.Pad(x, amounts, None if value == 0.0 else value)


def _pad_bfloat16(op: OpBuilder, x: ir.Value, amounts: list[int], value: float) -> ir.Value:
    """Concatenate borders to an image axis by axis; pad in float32 if its shape is not static."""
    sizes = D.static_sizes(op.dims(x))
    if sizes is None:
        wide = op.Pad(op.cast(x, ir.DataType.FLOAT), amounts, None if value == 0.0 else value)
        return op.cast(wide, x.dtype)
    rank = len(sizes)
    for axis in range(rank):
        ends = amounts[axis], amounts[rank + axis]
        borders = [
            op.Expand(op.const(value, x.dtype), [*sizes[:axis], n, *sizes[axis + 1 :]])
            if n
            else None
            for n in ends
        ]
        parts = [p for p in (borders[0], x, borders[1]) if p is not None]
        if len(parts) > 1:
            x = op.Concat(*parts, axis=axis)
            sizes[axis] += sum(ends)
    return x


def tap_slices(
    op: OpBuilder,
    padded: ir.Value,
    win: Windows,
    axes: Sequence[int] | None = None,
    like: ir.Value | None = None,
) -> list[ir.Value]:
    """Return one strided slice of the input per tap: what all windows read at that tap.

    Args:
        op: the builder.
        padded: the input, already padded.
        win: the windows.
        axes: the spatial axes of ``padded``, by default all but the first two.
        like: a value whose last axes have one position per window; by default as many windows as
            fit.
    """
    axes = win.axes if axes is None else list(axes)
    whole = [op.dims(padded)[a] for a in axes]
    ends = _static_slice_ends(win) if like is None else _slice_ends_like(op, win, like)
    steps = list(win.strides) if any(s != 1 for s in win.strides) else None
    slices = []
    for tap, end in zip(win.taps(), ends, strict=True):
        is_whole = not any(tap) and steps is None and end in ([_END] * win.rank, whole)
        slices.append(padded if is_whole else op.Slice(padded, list(tap), end, axes, steps))
    return slices


def _static_slice_ends(win: Windows) -> list[list[int]]:
    """Return the end of each tap's slice, counted from the end of the input."""
    reach = [(win.extent(i) or 1) - 1 for i in range(win.rank)]
    return [[t - r or _END for t, r in zip(tap, reach, strict=True)] for tap in win.taps()]


def _slice_ends_like(
    op: OpBuilder, win: Windows, like: ir.Value
) -> list[list[int]] | list[ir.Value]:
    """Return the end of each tap's slice, for as many windows as ``like`` has positions."""
    sizes = [d for d in op.dims(like)[-win.rank :] if isinstance(d, int)]
    if len(sizes) == win.rank:
        spans = [(s - 1) * stride + 1 for s, stride in zip(sizes, win.strides, strict=True)]
        return [[t + s for t, s in zip(tap, spans, strict=True)] for tap in win.taps()]
    last = op.Shape(like, start=op.rank(like) - win.rank)
    if any(s != 1 for s in win.strides):
        last = op.Add(op.Mul(op.Sub(last, 1), list(win.strides)), 1)
    return [op.Add(last, list(tap)) if any(tap) else last for tap in win.taps()]


def same_pads(op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows, *, upper: bool) -> tuple:
    """Return the padding of SAME_UPPER or SAME_LOWER as two int64 vectors, computed at run time."""
    if win.static_kernel is None:
        raise UndifferentiableError(
            f"auto_pad of {x.name!r} requires a static kernel size\n"
            "hint: set kernel_shape or explicit pads on the node"
        )
    extents = [win.extent(i) for i in range(win.rank)]
    inside, outside = op.Shape(x, start=2), op.Shape(y, start=2)
    spanned = op.Add(op.Mul(op.Sub(outside, 1), list(win.strides)), extents)
    total = op.Max(op.Sub(spanned, inside), op.const([0] * win.rank))
    small = op.Div(total, [2] * win.rank)
    large = op.Sub(total, small)
    return (small, large) if upper else (large, small)


def pad_dynamic(
    op: OpBuilder, x: ir.Value, before: ir.Value, after: ir.Value, value: float = 0.0
) -> ir.Value:
    """Pad the spatial axes of ``x`` by amounts computed at run time."""
    unpadded = op.const([0, 0])  # batch and channels
    amounts = op.Concat(unpadded, before, unpadded, after, axis=0)
    return op.Pad(x, amounts, None if value == 0.0 else value)


def crop_like(op: OpBuilder, padded: ir.Value, before: ir.Value, x: ir.Value) -> ir.Value:
    """Undo padding: return the part of ``padded`` at the positions of ``x``."""
    axes = list(range(2, op.rank(x)))
    return op.Slice(padded, before, op.Add(before, op.Shape(x, start=2)), axes)


def resolve_auto_pad(
    op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows, auto_pad: str
) -> Windows | None:
    """Return the windows with ``auto_pad`` as explicit pads; ``None`` if they are not static."""
    if auto_pad in ("NOTSET", "VALID"):
        return win
    before, after = [], []
    for i, (size, count) in enumerate(zip(op.dims(x)[2:], op.dims(y)[2:], strict=True)):
        stride, extent = win.strides[i], win.extent(i)
        if extent is None:
            return None
        if stride == 1:
            total = extent - 1
        elif isinstance(size, int) and isinstance(count, int):
            total = max(stride * (count - 1) + extent - size, 0)
        else:
            return None
        small, large = total // 2, total - total // 2
        before.append(small if auto_pad == "SAME_UPPER" else large)
        after.append(large if auto_pad == "SAME_UPPER" else small)
    return dataclasses.replace(win, before=tuple(before), after=tuple(after))


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """Sizes that decide how to lower a convolution and its gradients; unknown ones are ``None``."""

    taps: int | None
    strided: bool
    channels: int | None
    """Input channels per group."""
    outs: int | None
    """Output channels per group."""
    group: int
    image: int | None = None
    """Number of positions in the input."""
    positions: int | None = None
    """Number of positions in the output."""
    overpadded: bool = False
    """Whether some windows read padding only."""
    can_use_col2im: bool = False
    """Whether a matmul followed by Col2Im can compute the input's gradient."""
    rows: int | None = None
    """Number of positions in the output over the whole batch."""
    bfloat16: bool = False
    """Whether images are bfloat16."""
    shiftable: bool = False
    """Whether square windows with stride 1 keep the size of a 2-D image of static shape."""
    line_pairs: int | None = None
    """Pairs of input and output positions along the last axis; ``None`` for 1-D."""

    @property
    def few_taps(self) -> bool:
        """Whether there are few enough taps to unroll them, one slice each."""
        return self.taps is not None and self.taps <= T.UNROLLED_TAPS

    @property
    def small_kernel(self) -> bool:
        """Whether the kernel is 3x3 or smaller."""
        return self.taps is not None and self.taps <= T.SMALL_KERNEL_TAPS

    @property
    def depthwise(self) -> bool:
        """Whether each channel is a group of its own."""
        return self.few_taps and self.group > 1 and self.channels == 1 and self.outs == 1

    @property
    def pairs(self) -> int | None:
        """Number of pairs of an input and an output position."""
        if self.image is None or self.positions is None:
            return None
        return self.image * self.positions

    def pairs_up_to(self, limit: int) -> bool:
        """Whether the number of pairs is known and at most ``limit``."""
        return self.pairs is not None and self.pairs <= limit

    def line_pairs_up_to(self, limit: int) -> bool:
        """Whether the convolution is 2-D or 3-D with at most ``limit`` pairs on its last axis."""
        return self.line_pairs is not None and self.line_pairs <= limit

    @property
    def one_group(self) -> bool:
        """Whether there is one group with known channel counts."""
        return self.group == 1 and self.channels is not None and self.outs is not None

    @property
    def dense(self) -> bool:
        """Whether there is one group with more than a few channels."""
        return self.one_group and not self.narrow

    @property
    def narrow(self) -> bool:
        """Whether the channels alone, one tap at a time, make too small a matmul."""
        return self.channels is not None and self.channels < T.NARROW_CHANNELS

    def positions_up_to(self, limit: int) -> bool:
        """Whether the number of output positions is known and at most ``limit``."""
        return self.positions is not None and self.positions <= limit

    @property
    def tiny_image(self) -> bool:
        """Whether the kernel has several taps and the output is known to have few positions."""
        return self.taps != 1 and self.positions_up_to(T.TINY_IMAGE_POSITIONS)

    @property
    def small_image(self) -> bool:
        """Whether summing weight gradients over the batch costs more than transposing images."""
        if self.channels is None or self.outs is None or self.positions is None:
            return False
        return self.channels * self.outs > (self.channels + self.outs) * self.positions


def conv_shape_of(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ConvShape:
    """Return the sizes of ``Conv(x, w)``, whose output has the shape of ``dy``."""
    outs, channels = op.dims(w)[:2]
    return ConvShape(
        taps=win.count,
        strided=any(s != 1 for s in win.strides),
        channels=channels if isinstance(channels, int) else None,
        outs=outs // group if isinstance(outs, int) else None,
        group=group,
        image=_static_product(op.dims(x)[2:]),
        positions=_static_product(op.dims(dy)[2:]),
        overpadded=any(
            p >= (win.extent(i % win.rank) or 0) for i, p in enumerate(win.pads) if p > 0
        ),
        can_use_col2im=_can_use_col2im(op, x, dy, w, win, group),
        rows=_static_product([op.dims(dy)[0], *op.dims(dy)[2:]]),
        bfloat16=dy.dtype == ir.DataType.BFLOAT16,
        shiftable=_shiftable(op, x, dy, w, win, group),
        line_pairs=_static_product([op.dims(v)[-1] for v in (x, dy)]) if win.rank > 1 else None,
    )


def is_pointwise(win: Windows) -> bool:
    """Return whether the kernel has one tap, without strides or padding."""
    return win.count == 1 and not any(win.pads) and all(s == 1 for s in win.strides)


def _can_use_col2im(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> bool:
    """Return whether all sizes are static and onnxruntime's Col2Im kernel accepts them."""
    image, count = D.static_sizes(op.dims(x)[2:]), D.static_sizes(op.dims(dy)[2:])
    if group != 1 or D.static_sizes(op.dims(w)) is None or image is None or count is None:
        return False
    if is_pointwise(win):
        return True
    if win.rank != 2 or x.dtype != ir.DataType.FLOAT:
        return False
    ends = [
        size + win.before[i] + win.after[i] - (win.extent(i) or 0) for i, size in enumerate(image)
    ]
    return list(count) == [end // s + 1 for end, s in zip(ends, win.strides, strict=True)]


def _shiftable(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> bool:
    image, count, kernel = (D.static_sizes(op.dims(v)[2:]) for v in (x, dy, w))
    if image is None or kernel is None or group != 1 or win.rank != 2:
        return False
    plain = all(n == 1 for n in (*win.strides, *win.dilations))
    square = kernel[0] == kernel[1] and 1 < kernel[0] <= min(image)
    return plain and square and image == count and D.static_sizes(op.dims(w)) is not None


def _static_product(sizes: Sequence[Dim]) -> int | None:
    static = D.static_sizes(sizes)
    return None if static is None else math.prod(static)


def can_use_im2col(facts: ConvShape) -> bool:
    """Return whether :func:`im2col` applies: few taps, one group, images of static size."""
    return facts.few_taps and facts.one_group and facts.image is not None


def im2col(op: OpBuilder, x: ir.Value, win: Windows, *, taps_first: bool) -> ir.Value:
    """Return the im2col matrix [N * positions, channels * taps]: what each window reads.

    ``taps_first=True`` orders columns as (taps, channels), which saves one copy;
    ``taps_first=False`` as (channels, taps), the order of a weight.
    """
    channels, taps = op.dims(x)[1], win.count
    assert isinstance(channels, int)
    assert taps is not None
    channels_last = op.Transpose(x, perm=[0, *win.axes, 1])
    if is_pointwise(win):
        return op.Reshape(channels_last, [-1, channels])
    windows = _gather_windows(op, channels_last, win)
    if not taps_first and taps > 1:
        windows = op.Transpose(windows, perm=[0, 1, 3, 2])
    return op.Reshape(windows, [-1, channels * taps])


def _gather_windows(op: OpBuilder, channels_last: ir.Value, win: Windows) -> ir.Value:
    """Return [N, positions, taps, channels]: what the window at each position reads.

    Taps in the padding read an extra position of zeros, appended after all others.
    """
    image = D.static_sizes(op.dims(channels_last)[1:-1])
    assert image is not None
    # Flat index of the input position by (window, tap), and whether it is inside the image; both
    # grow by one axis per iteration.
    index: np.ndarray = np.zeros((1, 1), np.int64)
    inside: np.ndarray = np.ones((1, 1), bool)
    for i, size in enumerate(image):
        extent = win.extent(i)
        assert extent is not None
        count = (size + win.before[i] + win.after[i] - extent) // win.strides[i] + 1
        starts = np.arange(count) * win.strides[i] - win.before[i]
        along = starts[:, None] + np.arange(0, extent, win.dilations[i])
        shape = [len(index) * len(along), -1]
        inside_axis = (along >= 0) & (along < size)
        index = (index[:, None, :, None] * size + along[None, :, None, :]).reshape(shape)
        inside = (inside[:, None, :, None] & inside_axis[None, :, None, :]).reshape(shape)
    area = math.prod(image)
    flat = op.Reshape(channels_last, [0, area, op.dims(channels_last)[-1]])
    if not inside.all():
        flat = _append_zero_position(op, flat)
    index = np.where(inside, index, area)
    return op.Gather(flat, op.const(index, ir.DataType.INT64), axis=1)


def _append_zero_position(op: OpBuilder, flat: ir.Value) -> ir.Value:
    """Append a position of zeros to [N, positions, channels]."""
    sizes = D.static_sizes(op.dims(flat))
    if flat.dtype == ir.DataType.BFLOAT16 and op.target.lacks("Pad.bfloat16") and sizes:
        zero = op.const(np.zeros((sizes[0], 1, sizes[2])), flat.dtype)
        return op.Concat(flat, zero, axis=1)
    # List all axes: onnxruntime fails when it moves a Transpose past a Pad with an `axes` input.
    return op.Pad(flat, [0, 0, 0, 0, 1, 0])


def prefers_im2col_matmul(facts: ConvShape) -> bool:
    """Return whether the forward convolution is faster as im2col and matmul."""
    if not can_use_im2col(facts) or not facts.dense or not facts.small_kernel:
        return False
    limit, rows = T.CONV_FORWARD_MATMUL_POSITIONS, facts.rows
    if rows is not None and rows <= T.CONV_FORWARD_MATMUL_ROWS and facts.taps != 1:
        limit *= 2
    return facts.positions_up_to(limit)


def channels_first_perm(rank: int) -> list[int]:
    """Return the Transpose ``perm`` from channels last to channels first."""
    return [0, 1 + rank, *range(1, 1 + rank)]


# Modes in which output position i reads input position i // s for an integer scale s: i / s rounded
# down, or (i + 0.5) / s - 0.5 rounded to the nearest, which never ties.
_NEAREST_ROUNDING = {
    "asymmetric": frozenset({"floor"}),
    "half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
    "pytorch_half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
}


def nearest_repeats(node: ir.Node, opset: int) -> list[int] | None:
    """Return the integer repeats per spatial axis of a nearest-neighbor Resize, else ``None``."""
    x, options = node.inputs[0], S.attributes_of(node, opset)
    rounding = _NEAREST_ROUNDING.get(options["coordinate_transformation_mode"], frozenset())
    if x is None or options["mode"] != "nearest" or options["nearest_mode"] not in rounding:
        return None
    if options.get("axes") or options.get("keep_aspect_ratio_policy") not in (None, "stretch"):
        return None
    old, new = S.dims_of(x), S.dims_of(node.outputs[0])
    if old is None or new is None or len(old) - 2 not in (1, 2, 3) or old[:2] != new[:2]:
        return None
    before, after = D.static_sizes(old[1:]), D.static_sizes(new[1:])
    if before is None or after is None or min(before) < 1:
        return None
    factors = [b // a for a, b in zip(before, after, strict=True)]
    if factors != [b / a for a, b in zip(before, after, strict=True)]:
        return None
    scales = (*node.inputs, None, None)[2]
    if scales is not None and S.dims_of(scales) != (0,):
        given = S.constant_of(scales)
        if given is None or not np.array_equal(given[1:], factors) or given[0] != 1.0:
            return None
    return factors[1:]


def repeat_nearest(
    op: OpBuilder, x: ir.Value, *_unused: ir.Value | None, node: ir.Node
) -> ir.Value | None:
    """Upsample bfloat16 images by Expand, for runtimes without a bfloat16 Resize.

    Reshape to [N, C, H, 1, W, 1], Expand to [N, C, H, sh, W, sw], Reshape to [N, C, H*sh, W*sw].
    """
    factors = nearest_repeats(node, op.opset)
    sizes = D.static_sizes(op.dims(x)[1:])
    if x.dtype != ir.DataType.BFLOAT16 or factors is None or sizes is None:
        return None
    split = [n for size in sizes[1:] for n in (size, 1)]
    repeats = [n for factor in factors for n in (1, factor)]
    repeated = op.Expand(op.Reshape(x, [-1, sizes[0], *split]), op.const([1, 1, *repeats]))
    merged = [size * factor for size, factor in zip(sizes[1:], factors, strict=True)]
    return op.Reshape(repeated, [-1, sizes[0], *merged])
