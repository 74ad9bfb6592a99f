"""A picture made rough, then painted: what the finished model does.

The net is given what a style has no say in: light and dark of a picture without its details, and
a little of its colours. On that lies a layout: a little of the light and dark of the style picture,
and its thin dark lines. It says where tiles or strokes may be where the picture itself is even,
and that they have outlines where it is dark.
"""

from __future__ import annotations

import numpy as np
import torch
from net import TransformerNet
from torch import Tensor, nn

LIGHT = (0.299, 0.587, 0.114)
COLOUR = 0.3
"""How much of its colours a picture keeps."""
BLUR = 2.3
"""How rough pictures are, in pixels."""
CONTRAST, MIDDLE = 0.85, 128.0
"""How much of its contrast a picture keeps, around what brightness: the layout has to be seen."""
VARIETY, DEPTH = 0.35, 60.0
"""How much of its light and dark the layout has, and how dark its lines are."""
LINE = 9
"""Lines are thinner than so many pixels: an odd number."""
ROUNDS = 12
"""How often the layout is repeated, each way: so large may pictures be."""


class Rough(nn.Module):
    """Blurs a picture and takes most of its colours: two convolutions that are never trained."""

    def __init__(self, blur: float = BLUR):
        super().__init__()
        reach = int(3 * blur)
        taps = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * blur**2))
        taps = taps / taps.sum()
        light = torch.tensor(LIGHT).expand(3, 3)
        mix = COLOUR * torch.eye(3) + (1 - COLOUR) * light
        self.pad = nn.ReflectionPad2d(reach)
        self.register_buffer("across", mix[:, :, None, None] * taps.view(1, 1, 1, -1))
        self.register_buffer("down", torch.eye(3)[:, :, None, None] * taps.view(1, 1, -1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Return a picture of the same size."""
        x = nn.functional.conv2d(self.pad(image), self.across)
        return nn.functional.conv2d(x, self.down)


def lines(light: Tensor) -> Tensor:
    """Return how much darker thin dark lines are than what they part: [1, H, W] -> 0..1."""
    lighter = nn.functional.max_pool2d(light, LINE, 1, LINE // 2)
    without = -nn.functional.max_pool2d(-lighter, LINE, 1, LINE // 2)
    return 1 - (light + 1) / (without + 1)


def layout_of(style: np.ndarray) -> np.ndarray:
    """Return the layout of a style picture [H, W, 3]: about 0 on average, [1, H, W].

    It has some of the light and dark of the style made rough, and its thin lines, all equally
    dark, be they between light tiles or dark ones.
    """
    with torch.no_grad():
        planes = torch.from_numpy(np.ascontiguousarray(style.transpose(2, 0, 1)))[None]
        weights = torch.tensor(LIGHT).view(3, 1, 1)
        light = (planes[0] * weights).sum(0, keepdim=True)
        even = (Rough()(planes)[0] * weights).sum(0, keepdim=True)
        layout = VARIETY * even - DEPTH * lines(light)
    return (layout - layout.mean()).numpy()


def goes_on(style: np.ndarray) -> bool:
    """Return whether what ends at one side of a picture [H, W, 3] goes on at the other."""
    jumps = [
        (np.abs(style.take(0, axis) - style.take(-1, axis)), np.abs(np.diff(style, axis=axis)))
        for axis in (0, 1)
    ]
    return all(between.mean() < 2 * within.mean() for between, within in jumps)


class Given(nn.Module):
    """What the net is given of a picture and a layout of its size."""

    def __init__(self):
        super().__init__()
        self.rough = Rough()

    def forward(self, image: Tensor, layout: Tensor, contrast: float = 1.0) -> Tensor:
        """Return the picture made rough, with less contrast, under the layout."""
        return contrast * (self.rough(image) - MIDDLE) + MIDDLE + layout


class Stylist(nn.Module):
    """A picture [batch, 3, H, W] of 0..255 in another style; H and W are multiples of 4."""

    def __init__(self, net: TransformerNet, style: np.ndarray):
        super().__init__()
        self.net, self.given = net, Given()
        layout = layout_of(style)
        self.mirrored = not goes_on(style)
        self.register_buffer("layout", torch.from_numpy(layout)[None])

    def forward(self, image: Tensor) -> Tensor:
        """Return the painted picture."""
        height, width = image.shape[2], image.shape[3]
        layout = self.layout
        if self.mirrored:  # no seams
            layout = torch.cat([layout, layout.flip(3)], 3)
            layout = torch.cat([layout, layout.flip(2)], 2)
        layout = layout.repeat(1, 1, 1, ROUNDS)[..., :width]
        layout = layout.repeat(1, 1, ROUNDS, 1)[:, :, :height]
        return self.net(self.given(image, layout, CONTRAST)).clamp(0, 255)
