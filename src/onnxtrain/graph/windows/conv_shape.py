"""What the form of a convolution's gradient depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.windows.geometry import Windows


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
    addable: bool = False
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


def facts_of(
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
        image=_product(op.dims(x)[2:]),
        positions=_product(op.dims(dy)[2:]),
        overpadded=any(
            p >= (win.extent(i % win.rank) or 0) for i, p in enumerate(win.pads) if p > 0
        ),
        addable=_addable(op, x, dy, w, win, group),
        rows=_product([op.dims(dy)[0], *op.dims(dy)[2:]]),
        bfloat16=dy.dtype == ir.DataType.BFLOAT16,
        shiftable=_shiftable(op, x, dy, w, win, group),
        line_pairs=_product([op.dims(v)[-1] for v in (x, dy)]) if win.rank > 1 else None,
    )


def one_to_one(win: Windows) -> bool:
    """Return whether every window reads one position of its own, and all positions are read."""
    return win.count == 1 and not any(win.pads) and all(s == 1 for s in win.strides)


def _addable(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> bool:
    """Return whether all sizes are known, and onnxruntime has a Col2Im for them if needed."""
    image, count = D.numbers(op.dims(x)[2:]), D.numbers(op.dims(dy)[2:])
    if group != 1 or D.numbers(op.dims(w)) is None or image is None or count is None:
        return False
    if one_to_one(win):
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
    image, count, kernel = (D.numbers(op.dims(v)[2:]) for v in (x, dy, w))
    if image is None or kernel is None or group != 1 or win.rank != 2:
        return False
    plain = all(n == 1 for n in (*win.strides, *win.dilations))
    square = kernel[0] == kernel[1] and 1 < kernel[0] <= min(image)
    return plain and square and image == count and D.numbers(op.dims(w)) is not None


def _product(sizes: Sequence[Dim]) -> int | None:
    numbers = [d for d in sizes if isinstance(d, int)]
    return int(np.prod(numbers)) if len(numbers) == len(sizes) else None
