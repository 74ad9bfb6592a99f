"""Sliding windows: the geometry that convolution and pooling share.

Along each spatial axis, output position ``o`` of a window reads input positions
``o * stride - before + t * dilation`` for taps ``t`` of the kernel.

What the form of a convolution's gradient depends on.

Convolutions of small images as one product over the whole batch.

A convolution kernel multiplies image by image, and reads the whole weight for each. Where images
have a few positions only, that is most of its time. Here a row of ``columns`` holds what a window
reads; all windows of the batch make one matrix, and the weight is read once, as it lies.

Resize that repeats each position a whole number of times, as nearest neighbours do.

Where an output position lies is ``i / s`` rounded down, or ``(i + 0.5) / s - 0.5`` rounded to the
nearest: for a whole ``s`` that is ``i // s``, and no tie is met.
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
    """Sizes; an entry that is not a number is only known at run time."""
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
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
        """The kernel, if all its sizes are numbers."""
        sizes = tuple(k for k in self.kernel if isinstance(k, int))
        return sizes if len(sizes) == self.rank else None

    @property
    def count(self) -> int | None:
        """The number of taps, if it is known."""
        return None if self.static_kernel is None else int(np.prod(self.static_kernel))

    def extent(self, i: int) -> int | None:
        """How many input positions a window spans, holes included."""
        k = self.kernel[i]
        return (k - 1) * self.dilations[i] + 1 if isinstance(k, int) else None

    def taps(self) -> Iterator[tuple[int, ...]]:
        """Return the offsets of the taps, last axis fastest."""
        assert self.static_kernel is not None
        return itertools.product(
            *(range(0, k * d, d) for k, d in zip(self.static_kernel, self.dilations, strict=True))
        )

    def unpadded(self) -> Windows:
        """Return the same windows over an input that is padded already."""
        return dataclasses.replace(self, before=(0,) * self.rank, after=(0,) * self.rank)


def window_geometry(
    kernel: Sequence[Dim],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> Windows:
    """Return the geometry of a node from its attributes."""
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
    """Return ``x`` with its spatial axes padded.

    All axes are written: a Pad that names its axes is beyond onnxruntime-web where a Transpose
    goes through it, as it does before a Conv of one spatial axis on a GPU.
    """
    if not any(win.pads):
        return x
    amounts = [0, 0, *win.before, 0, 0, *win.after]
    if x.dtype == ir.DataType.BFLOAT16 and op.target.lacks("Pad.bfloat16"):
        return _pad_bfloat16(op, x, amounts, value)
    return op.Pad(x, amounts, None if value == 0.0 else value)


def _pad_bfloat16(op: OpBuilder, x: ir.Value, amounts: list[int], value: float) -> ir.Value:
    """Join borders to an image axis by axis; where sizes are not known, pad it in float32."""
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
    """Give, for each tap, what all windows read there.

    Args:
        op: the builder.
        padded: the input, padded already.
        win: the windows.
        axes: the spatial axes of ``padded``, by default all but the first two.
        like: its last axes are the positions of the windows; by default as many as fit.
    """
    axes = win.axes if axes is None else list(axes)
    whole = [op.dims(padded)[a] for a in axes]
    ends = _static_slice_ends(win) if like is None else _slice_ends_like(op, win, like)
    steps = list(win.strides) if any(s != 1 for s in win.strides) else None
    slices = []
    for tap, end in zip(win.taps(), ends, strict=True):
        all_of_it = not any(tap) and steps is None and end in ([_END] * win.rank, whole)
        slices.append(padded if all_of_it else op.Slice(padded, list(tap), end, axes, steps))
    return slices


def _static_slice_ends(win: Windows) -> list[list[int]]:
    """Return where the slices of the taps end, counted from the end of the input."""
    reach = [(win.extent(i) or 1) - 1 for i in range(win.rank)]
    return [[t - r or _END for t, r in zip(tap, reach, strict=True)] for tap in win.taps()]


def _slice_ends_like(
    op: OpBuilder, win: Windows, like: ir.Value
) -> list[list[int]] | list[ir.Value]:
    """Return where the slices of the taps end, for as many windows as ``like`` has positions."""
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
            f"automatic padding of {x.name!r} needs a kernel of known size\n"
            "hint: give the node its kernel_shape, or explicit pads"
        )
    extents = [win.extent(i) for i in range(win.rank)]
    inside, outside = op.Shape(x, start=2), op.Shape(y, start=2)
    spanned = op.Add(op.Mul(op.Sub(outside, 1), list(win.strides)), extents)
    total = op.Max(op.Sub(spanned, inside), op.const([0] * win.rank))
    half = op.Div(total, [2] * win.rank)
    rest = op.Sub(total, half)
    return (half, rest) if upper else (rest, half)


def pad_dynamic(
    op: OpBuilder, x: ir.Value, before: ir.Value, after: ir.Value, value: float = 0.0
) -> ir.Value:
    """Return ``x`` with its spatial axes padded by amounts that are computed."""
    none = op.const([0, 0])
    amounts = op.Concat(none, before, none, after, axis=0)
    return op.Pad(x, amounts, None if value == 0.0 else value)


def crop_like(op: OpBuilder, padded: ir.Value, before: ir.Value, x: ir.Value) -> ir.Value:
    """Undo padding: give the part of ``padded`` that ``x`` is."""
    axes = list(range(2, op.rank(x)))
    return op.Slice(padded, before, op.Add(before, op.Shape(x, start=2)), axes)


def resolve_auto_pad(
    op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows, auto_pad: str
) -> Windows | None:
    """Return the windows with automatic padding made explicit; ``None`` if only a run can tell."""
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
    """Sizes that are not known are None."""

    taps: int | None
    strided: bool
    channels: int | None
    """Input channels per group."""
    outs: int | None
    """Output channels per group."""
    group: int
    image: int | None = None
    """Positions in the input."""
    positions: int | None = None
    """Positions in the output."""
    overpadded: bool = False
    """Whether some windows read padding only."""
    can_use_col2im: bool = False
    """Whether a product can give the input's gradient, windows added up by Col2Im."""
    rows: int | None = None
    """Positions in the output, over the whole batch."""
    bfloat16: bool = False
    """Whether images are bfloat16."""
    shiftable: bool = False
    """Whether windows are squares, one at each position of a plane of known size, in one group."""
    line_pairs: int | None = None
    """Pairs of an input and an output position along the last axis; None if it is the only one."""

    @property
    def few_taps(self) -> bool:
        """Whether the taps may be unrolled, one slice each."""
        return self.taps is not None and self.taps <= T.UNROLLED_TAPS

    @property
    def small_kernel(self) -> bool:
        """Whether the kernel is 3x3 or smaller."""
        return self.taps is not None and self.taps <= T.SMALL_KERNEL_TAPS

    @property
    def depthwise(self) -> bool:
        """Whether every channel is on its own."""
        return self.few_taps and self.group > 1 and self.channels == 1 and self.outs == 1

    @property
    def pairs(self) -> int | None:
        """How many pairs of an input and an output position there are."""
        if self.image is None or self.positions is None:
            return None
        return self.image * self.positions

    def pairs_up_to(self, limit: int) -> bool:
        """Whether there are known to be that few pairs."""
        return self.pairs is not None and self.pairs <= limit

    def line_pairs_up_to(self, limit: int) -> bool:
        """Whether there are several axes, and few pairs of positions along the last one."""
        return self.line_pairs is not None and self.line_pairs <= limit

    @property
    def one_group(self) -> bool:
        """Whether all channels are in one group, and their numbers are known."""
        return self.group == 1 and self.channels is not None and self.outs is not None

    @property
    def dense(self) -> bool:
        """Whether there is one group with more than a few channels."""
        return self.one_group and not self.narrow

    @property
    def narrow(self) -> bool:
        """Whether one tap alone makes too small a product."""
        return self.channels is not None and self.channels < T.NARROW_CHANNELS

    def positions_up_to(self, limit: int) -> bool:
        """Whether the output is known to have that few positions."""
        return self.positions is not None and self.positions <= limit

    @property
    def tiny_image(self) -> bool:
        """Whether the output is known to have few positions, and the kernel more than one tap."""
        return self.taps != 1 and self.positions_up_to(T.TINY_IMAGE_POSITIONS)

    @property
    def small_image(self) -> bool:
        """Whether summing weights over the batch costs more than transposing the images."""
        if self.channels is None or self.outs is None or self.positions is None:
            return False
        return self.channels * self.outs > (self.channels + self.outs) * self.positions


def conv_shape_of(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ConvShape:
    """Return what is known of ``dy = Conv(x, w)``."""
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
    """Return whether every window reads one position of its own, and all positions are read."""
    return win.count == 1 and not any(win.pads) and all(s == 1 for s in win.strides)


def _can_use_col2im(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> bool:
    """Return whether all sizes are known, and onnxruntime has a Col2Im for them if needed."""
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
    numbers = [d for d in sizes if isinstance(d, int)]
    return int(np.prod(numbers)) if len(numbers) == len(sizes) else None


def can_use_im2col(facts: ConvShape) -> bool:
    """Return whether there can be columns: of one group, over images of known size."""
    return facts.few_taps and facts.one_group and facts.image is not None


def im2col(op: OpBuilder, x: ir.Value, win: Windows, *, taps_first: bool) -> ir.Value:
    """Return [N * positions, channels * taps]; taps vary slowest if ``taps_first``, else fastest.

    The first order is made with one copy less, the second one is the order of a weight.
    """
    channels, taps = op.dims(x)[1], win.count
    assert isinstance(channels, int)
    assert taps is not None
    last = op.Transpose(x, perm=[0, *win.axes, 1])
    if is_pointwise(win):
        return op.Reshape(last, [-1, channels])
    reads = _gather_windows(op, last, win)
    if not taps_first and taps > 1:
        reads = op.Transpose(reads, perm=[0, 1, 3, 2])
    return op.Reshape(reads, [-1, channels * taps])


def _gather_windows(op: OpBuilder, last: ir.Value, win: Windows) -> ir.Value:
    """Return [N, positions, taps, channels]: at each position, what its window reads.

    Outside of the image it reads a position of zeros, put behind all others.
    """
    image = D.static_sizes(op.dims(last)[1:-1])
    assert image is not None
    place: np.ndarray = np.zeros((1, 1), np.int64)
    inside: np.ndarray = np.ones((1, 1), bool)
    for i, size in enumerate(image):
        extent = win.extent(i)
        assert extent is not None
        count = (size + win.before[i] + win.after[i] - extent) // win.strides[i] + 1
        starts = np.arange(count) * win.strides[i] - win.before[i]
        at = starts[:, None] + np.arange(0, extent, win.dilations[i])
        shape = [len(place) * len(at), -1]
        within = (at >= 0) & (at < size)
        place = (place[:, None, :, None] * size + at[None, :, None, :]).reshape(shape)
        inside = (inside[:, None, :, None] & within[None, :, None, :]).reshape(shape)
    area = math.prod(image)
    flat = op.Reshape(last, [0, area, op.dims(last)[-1]])
    if not inside.all():
        flat = _append_zero_position(op, flat)
    where = np.where(inside, place, area)
    return op.Gather(flat, op.const(where, ir.DataType.INT64), axis=1)


def _append_zero_position(op: OpBuilder, flat: ir.Value) -> ir.Value:
    """Put a position of zeros behind all others of [N, positions, channels]."""
    sizes = D.static_sizes(op.dims(flat))
    if flat.dtype == ir.DataType.BFLOAT16 and op.target.lacks("Pad.bfloat16") and sizes:
        zero = op.const(np.zeros((sizes[0], 1, sizes[2])), flat.dtype)
        return op.Concat(flat, zero, axis=1)
    # Of all axes: onnxruntime errs when it moves a Transpose past a partial Pad.
    return op.Pad(flat, [0, 0, 0, 0, 1, 0])


def prefers_im2col_matmul(facts: ConvShape) -> bool:
    """Return whether the forward convolution had better be a product."""
    if not can_use_im2col(facts) or not facts.dense or not facts.small_kernel:
        return False
    limit, rows = T.CONV_FORWARD_MATMUL_POSITIONS, facts.rows
    if rows is not None and rows <= T.CONV_FORWARD_MATMUL_ROWS and facts.taps != 1:
        limit *= 2
    return facts.positions_up_to(limit)


def channels_first_perm(rank: int) -> list[int]:
    """Return the order that moves channels from the end to the second place."""
    return [0, 1 + rank, *range(1, 1 + rank)]


_NEAREST_ROUNDING = {
    "asymmetric": frozenset({"floor"}),
    "half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
    "pytorch_half_pixel": frozenset({"round_prefer_floor", "round_prefer_ceil"}),
}


def nearest_repeats(node: ir.Node, opset: int) -> list[int] | None:
    """Return how often a Resize repeats positions along each axis of an image, if that is all."""
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
    """Return what a Resize makes of 16-bit images, by axes that are spread."""
    factors = nearest_repeats(node, op.opset)
    sizes = D.static_sizes(op.dims(x)[1:])
    if x.dtype != ir.DataType.BFLOAT16 or factors is None or sizes is None:
        return None
    apart = [n for size in sizes[1:] for n in (size, 1)]
    spread = [n for factor in factors for n in (1, factor)]
    wide = op.Expand(op.Reshape(x, [-1, sizes[0], *apart]), op.const([1, 1, *spread]))
    joined = [size * factor for size, factor in zip(sizes[1:], factors, strict=True)]
    return op.Reshape(wide, [-1, sizes[0], *joined])
