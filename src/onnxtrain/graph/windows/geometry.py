"""Sliding windows: the geometry that convolution and pooling share.

Along each spatial axis, output position ``o`` of a window reads input positions
``o * stride - before + t * dilation`` for taps ``t`` of the kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import UndifferentiableError
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


def windows(
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
    sizes = D.numbers(op.dims(x))
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
    ends = _fitting_ends(win) if like is None else _ends_like(op, win, like)
    steps = list(win.strides) if any(s != 1 for s in win.strides) else None
    slices = []
    for tap, end in zip(win.taps(), ends, strict=True):
        all_of_it = not any(tap) and steps is None and end in ([_END] * win.rank, whole)
        slices.append(padded if all_of_it else op.Slice(padded, list(tap), end, axes, steps))
    return slices


def _fitting_ends(win: Windows) -> list[list[int]]:
    """Return where the slices of the taps end, counted from the end of the input."""
    reach = [(win.extent(i) or 1) - 1 for i in range(win.rank)]
    return [[t - r or _END for t, r in zip(tap, reach, strict=True)] for tap in win.taps()]


def _ends_like(op: OpBuilder, win: Windows, like: ir.Value) -> list[list[int]] | list[ir.Value]:
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


def pad_at_run_time(
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


def fixed_padding(
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
