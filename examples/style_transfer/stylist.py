"""A picture made rough, then painted: what the finished model does.

The net is given what a style has no say in: light and dark of a picture without its details, and
a little of its colours. On that lies a layout, light and dark of the style picture made rough in
the same way, which says where tiles or strokes may be where the picture itself is even.
"""

from __future__ import annotations

import numpy as np
import torch
from net import TransformerNet
from torch import Tensor, nn

LIGHT = (0.299, 0.587, 0.114)
COLOUR = 0.3
"""How much of its colours a picture keeps."""
BLUR, STRENGTH = 2.5, 0.7
"""How rough pictures are, in pixels, and how much of the layout lies on them: in training."""
FINER, FAINTER, CONTRAST = 2.1, 0.65, 1.2
"""Finished pictures are less rough, with less of the layout and more contrast: one knows them."""
MIDDLE = 155.0
"""What stays as bright as it is; most of a mosaic is darker than most photos."""
ROUNDS = 6
"""How often the layout and its mirror are repeated, each way: so large may pictures be."""


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


def layout_of(style: np.ndarray, rough: Rough) -> np.ndarray:
    """Return the layout of a style picture [H, W, 3]: about 0 on average, [1, H, W]."""
    with torch.no_grad():
        planes = torch.from_numpy(np.ascontiguousarray(style.transpose(2, 0, 1)))[None]
        light = (rough(planes)[0] * torch.tensor(LIGHT).view(3, 1, 1)).sum(0, keepdim=True)
    return (STRENGTH * (light - light.mean())).numpy()


class Stylist(nn.Module):
    """A picture [batch, 3, H, W] of 0..255 in another style; H and W are multiples of 4."""

    def __init__(self, net: TransformerNet, style: np.ndarray):
        super().__init__()
        self.net, self.rough = net, Rough(FINER)
        layout = FAINTER * layout_of(style, Rough())
        self.register_buffer("layout", torch.from_numpy(layout)[None])

    def forward(self, image: Tensor) -> Tensor:
        """Return the painted picture."""
        height, width = image.shape[2], image.shape[3]
        row = torch.cat([self.layout, self.layout.flip(3)], 3)  # mirrored: no seams
        both = torch.cat([row, row.flip(2)], 2)
        layout = both.repeat(1, 1, ROUNDS, ROUNDS)[:, :, :height, :width]
        given = CONTRAST * (self.rough(image) - MIDDLE) + MIDDLE + layout
        return self.net(given).clamp(0, 255)
