"""The complete model: preprocessing and the network.

Preprocessing removes what the style replaces: the image is blurred and mostly desaturated. Then it
adds a layout: a fraction of the brightness of the style image and its thin dark lines. The layout
places tiles or strokes in uniform regions, and outlines in dark regions.
"""

from __future__ import annotations

import numpy as np
import torch
from net import TransformerNet
from torch import Tensor, nn

LIGHT = (0.299, 0.587, 0.114)
SATURATION = 0.3
"""Remaining saturation of an image."""
BLUR = 2.3
"""Standard deviation of the blur in pixels."""
CONTRAST, MID_GRAY = 0.85, 128.0
"""Remaining contrast around a mid gray; it is reduced so that the layout is visible."""
BRIGHTNESS, LINE_DEPTH = 0.35, 60.0
"""Weight of the style's brightness in the layout, and darkness of its lines."""
MAX_LINE_WIDTH = 9
"""Lines are thinner than this many pixels; must be odd."""
REPEATS = 12
"""Repetitions of the layout in each direction, which limit the size of images."""


class Blur(nn.Module):
    """Blurs and desaturates an image, with two fixed convolutions."""

    def __init__(self, blur: float = BLUR):
        super().__init__()
        reach = int(3 * blur)
        taps = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * blur**2))
        taps = taps / taps.sum()
        light = torch.tensor(LIGHT).expand(3, 3)
        mix = SATURATION * torch.eye(3) + (1 - SATURATION) * light
        self.pad = nn.ReflectionPad2d(reach)
        self.register_buffer("across", mix[:, :, None, None] * taps.view(1, 1, 1, -1))
        self.register_buffer("down", torch.eye(3)[:, :, None, None] * taps.view(1, 1, -1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Return an image of the same size."""
        x = nn.functional.conv2d(self.pad(image), self.across)
        return nn.functional.conv2d(x, self.down)


def lines(light: Tensor) -> Tensor:
    """Return thin dark lines, relative to their surroundings: [1, H, W] -> 0..1."""
    lighter = nn.functional.max_pool2d(light, MAX_LINE_WIDTH, 1, MAX_LINE_WIDTH // 2)
    without = -nn.functional.max_pool2d(-lighter, MAX_LINE_WIDTH, 1, MAX_LINE_WIDTH // 2)
    return 1 - (light + 1) / (without + 1)


def layout_of(style: np.ndarray) -> np.ndarray:
    """Return the layout of a style image [H, W, 3]: [1, H, W] with mean 0.

    It is a fraction of the blurred brightness minus the thin lines, which are equally dark between
    light and dark tiles.
    """
    with torch.no_grad():
        planes = torch.from_numpy(np.ascontiguousarray(style.transpose(2, 0, 1)))[None]
        weights = torch.tensor(LIGHT).view(3, 1, 1)
        light = (planes[0] * weights).sum(0, keepdim=True)
        blurred = (Blur()(planes)[0] * weights).sum(0, keepdim=True)
        layout = BRIGHTNESS * blurred - LINE_DEPTH * lines(light)
    return (layout - layout.mean()).numpy()


def is_seamless(style: np.ndarray) -> bool:
    """Return whether an image [H, W, 3] tiles without visible seams."""
    jumps = [
        (np.abs(style.take(0, axis) - style.take(-1, axis)), np.abs(np.diff(style, axis=axis)))
        for axis in (0, 1)
    ]
    return all(between.mean() < 2 * within.mean() for between, within in jumps)


class Preprocess(nn.Module):
    """Blur an image, reduce its contrast and add a layout of the same size."""

    def __init__(self):
        super().__init__()
        self.blur = Blur()

    def forward(self, image: Tensor, layout: Tensor, contrast: float = 1.0) -> Tensor:
        """Return the input of the network."""
        return contrast * (self.blur(image) - MID_GRAY) + MID_GRAY + layout


class Stylist(nn.Module):
    """Stylize images [batch, 3, H, W] in 0..255; H and W are multiples of 4."""

    def __init__(self, net: TransformerNet, style: np.ndarray):
        super().__init__()
        self.net, self.preprocess = net, Preprocess()
        layout = layout_of(style)
        self.mirrored = not is_seamless(style)
        self.register_buffer("layout", torch.from_numpy(layout)[None])

    def forward(self, image: Tensor) -> Tensor:
        """Return the stylized images."""
        height, width = image.shape[2], image.shape[3]
        layout = self.layout
        if self.mirrored:  # avoid seams
            layout = torch.cat([layout, layout.flip(3)], 3)
            layout = torch.cat([layout, layout.flip(2)], 2)
        layout = layout.repeat(1, 1, 1, REPEATS)[..., :width]
        layout = layout.repeat(1, 1, REPEATS, 1)[:, :, :height]
        return self.net(self.preprocess(image, layout, CONTRAST)).clamp(0, 255)
