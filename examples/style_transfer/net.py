"""The network that styles a picture, and weight files of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

_STALE = re.compile(r"(^|\.)in\d+\.(running_mean|running_var|num_batches_tracked)$")


class PaddedConv(nn.Module):
    """A convolution after reflection, which leaves no frame of zeros around the picture."""

    def __init__(self, given: int, wanted: int, size: int, stride: int = 1, enlarge: int = 1):
        super().__init__()
        self.enlarge = enlarge
        self.reflection_pad = nn.ReflectionPad2d(size // 2)
        self.conv2d = nn.Conv2d(given, wanted, size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge if asked to, by repetition of pixels, then pad and convolve."""
        if self.enlarge > 1:
            x = nn.functional.interpolate(x, scale_factor=float(self.enlarge), mode="nearest")
        return self.conv2d(self.reflection_pad(x))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = PaddedConv(channels, channels, 3)
        self.in1 = nn.InstanceNorm2d(channels, affine=True)
        self.conv2 = PaddedConv(channels, channels, 3)
        self.in2 = nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        return x + self.in2(self.conv2(torch.relu(self.in1(self.conv1(x)))))


class TransformerNet(nn.Module):
    """A picture [batch, 3, H, W] of 0..255 in another style; H and W are multiples of 4.

    The names of the parameters are those of PyTorch's fast_neural_style example, so that weight
    files of either fit the other. ``channels`` is 32 there; 16 and 8 make smaller, faster nets.
    """

    def __init__(self, channels: int = 32):
        super().__init__()
        c = channels
        self.conv1 = PaddedConv(3, c, 9)
        self.in1 = nn.InstanceNorm2d(c, affine=True)
        self.conv2 = PaddedConv(c, 2 * c, 3, stride=2)
        self.in2 = nn.InstanceNorm2d(2 * c, affine=True)
        self.conv3 = PaddedConv(2 * c, 4 * c, 3, stride=2)
        self.in3 = nn.InstanceNorm2d(4 * c, affine=True)
        self.res1 = Residual(4 * c)
        self.res2 = Residual(4 * c)
        self.res3 = Residual(4 * c)
        self.res4 = Residual(4 * c)
        self.res5 = Residual(4 * c)
        self.deconv1 = PaddedConv(4 * c, 2 * c, 3, enlarge=2)
        self.in4 = nn.InstanceNorm2d(2 * c, affine=True)
        self.deconv2 = PaddedConv(2 * c, c, 3, enlarge=2)
        self.in5 = nn.InstanceNorm2d(c, affine=True)
        self.deconv3 = PaddedConv(c, 3, 9)

    def forward(self, image: Tensor) -> Tensor:
        """Down twice, five residual blocks, up twice."""
        x = torch.relu(self.in1(self.conv1(image)))
        x = torch.relu(self.in2(self.conv2(x)))
        x = torch.relu(self.in3(self.conv3(x)))
        x = self.res5(self.res4(self.res3(self.res2(self.res1(x)))))
        x = torch.relu(self.in4(self.deconv1(x)))
        x = torch.relu(self.in5(self.deconv2(x)))
        return self.deconv3(x)


def from_state(state: Mapping[str, Tensor]) -> TransformerNet:
    """Return the net of a weight file; how many channels it has is seen from the weights.

    Files of old PyTorch versions hold running statistics, which instance norm does not use:
    those are left out. Anything else that is missing or left over is an error.
    """
    kept = {name: value for name, value in state.items() if not _STALE.search(name)}
    if "conv1.conv2d.weight" not in kept:
        raise ValueError("no weights of a TransformerNet: there is no conv1.conv2d.weight")
    net = TransformerNet(kept["conv1.conv2d.weight"].shape[0])
    net.load_state_dict(kept)
    return net.eval()


def load_net(path: str | Path) -> TransformerNet:
    """Return the net of a ``.pth`` or ``.model`` file, of this or of PyTorch's example."""
    return from_state(torch.load(path, map_location="cpu", weights_only=True))
