"""What the spelling of a convolution's gradient depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.windows import Windows
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.dims import Dim


@dataclasses.dataclass(frozen=True)
class Facts:
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

    @property
    def few_taps(self) -> bool:
        """Whether the taps may be spelled out, one slice each."""
        return self.taps is not None and self.taps <= 64

    @property
    def nine_taps(self) -> bool:
        """Whether the kernel is 3x3 or smaller."""
        return self.taps is not None and self.taps <= 9

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

    @property
    def narrow(self) -> bool:
        """Whether one tap alone makes too small a product."""
        return self.channels is not None and self.channels < 8

    @property
    def tiny_image(self) -> bool:
        """Whether the output is known to have 16 positions or fewer, and more than one tap."""
        return self.taps != 1 and self.positions is not None and self.positions <= 16

    @property
    def small_image(self) -> bool:
        """Whether summing weights over the batch costs more than transposing the images."""
        if self.channels is None or self.outs is None or self.positions is None:
            return False
        return self.channels * self.outs > (self.channels + self.outs) * self.positions


def facts_of(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> Facts:
    """Give what is known of ``dy = Conv(x, w)``."""
    outs, channels = op.dims(w)[:2]
    return Facts(
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
    )


def _product(sizes: Sequence[Dim]) -> int | None:
    numbers = [d for d in sizes if isinstance(d, int)]
    return int(np.prod(numbers)) if len(numbers) == len(sizes) else None
