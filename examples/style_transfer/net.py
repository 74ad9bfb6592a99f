"""The image transformation network, and its weight files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

_STALE = re.compile(r"(^|\.)in\d+\.(running_mean|running_var|num_batches_tracked)$")


class PaddedConv(nn.Module):
    """A convolution with reflection padding, which avoids artifacts at the image border."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, upsample: int = 1):
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = nn.ReflectionPad2d(size // 2)
        self.conv2d = nn.Conv2d(inputs, outputs, size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Upsample (nearest neighbor), pad and convolve."""
        if self.upsample > 1:
            x = nn.functional.interpolate(x, scale_factor=float(self.upsample), mode="nearest")
        return self.conv2d(self.reflection_pad(x))


class Residual(nn.Module):
    """A residual block with two convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = PaddedConv(channels, channels, 3)
        self.in1 = nn.InstanceNorm2d(channels, affine=True)
        self.conv2 = PaddedConv(channels, channels, 3)
        self.in2 = nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the residual."""
        return x + self.in2(self.conv2(torch.relu(self.in1(self.conv1(x)))))


class TransformerNet(nn.Module):
    """Stylize images [batch, 3, H, W] in 0..255; H and W are multiples of 4.

    The parameter names match PyTorch's fast_neural_style example, so weight files are
    interchangeable. It uses ``channels=32``; 16 and 8 make smaller, faster networks.
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
        self.deconv1 = PaddedConv(4 * c, 2 * c, 3, upsample=2)
        self.in4 = nn.InstanceNorm2d(2 * c, affine=True)
        self.deconv2 = PaddedConv(2 * c, c, 3, upsample=2)
        self.in5 = nn.InstanceNorm2d(c, affine=True)
        self.deconv3 = PaddedConv(c, 3, 9)

    def forward(self, image: Tensor) -> Tensor:
        """Downsample twice, apply five residual blocks, upsample twice."""
        x = torch.relu(self.in1(self.conv1(image)))
        x = torch.relu(self.in2(self.conv2(x)))
        x = torch.relu(self.in3(self.conv3(x)))
        x = self.res5(self.res4(self.res3(self.res2(self.res1(x)))))
        x = torch.relu(self.in4(self.deconv1(x)))
        x = torch.relu(self.in5(self.deconv2(x)))
        return self.deconv3(x)


def from_state(state: Mapping[str, Tensor]) -> TransformerNet:
    """Return the network of a state dict; the number of channels follows from the weights.

    State dicts of old PyTorch versions contain running statistics, which InstanceNorm2d does not
    use; they are ignored. Other missing or unexpected keys are errors.
    """
    weights = {name: value for name, value in state.items() if not _STALE.search(name)}
    if "conv1.conv2d.weight" not in weights:
        raise ValueError("not a state dict of TransformerNet: conv1.conv2d.weight is missing")
    net = TransformerNet(weights["conv1.conv2d.weight"].shape[0])
    net.load_state_dict(weights)
    return net.eval()


def load_net(path: str | Path) -> TransformerNet:
    """Return the network of a ``.pth`` or ``.model`` file of this or of PyTorch's example."""
    return from_state(torch.load(path, map_location="cpu", weights_only=True))
