"""VGG16 features for an optional perceptual loss, from torchvision's weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512)


class FeatureNet(nn.Module):
    """VGG convolutions; returns the features of the last convolution at each resolution."""

    def __init__(self, layout: tuple[int | str, ...] = VGG16):
        super().__init__()
        layers: list[nn.Module] = []
        self.taps: list[int] = []
        channels = 3
        for kind, following in itertools.pairwise((*layout, "M")):
            if isinstance(kind, str):
                layers.append(nn.MaxPool2d(2))
                continue
            conv = nn.Conv2d(channels, kind, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)
            layers += [conv, nn.ReLU()]
            channels = kind
            if isinstance(following, str):
                self.taps.append(len(layers) - 1)
        self.features = nn.Sequential(*layers)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255)
        self.register_buffer("spread", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255)

    def forward(self, image: Tensor) -> list[Tensor]:
        """Return the features of an image in 0..255, highest resolution first."""
        x = (image - self.mean) / self.spread
        maps = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in self.taps:
                maps.append(x)
        return maps


def load_vgg16(path: str | Path) -> FeatureNet:
    """Return VGG16's features (relu1_2, 2_2, 3_3, 4_3) from torchvision's weight file."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    net = FeatureNet()
    expected = net.features.state_dict()
    net.features.load_state_dict({name: state[f"features.{name}"] for name in expected})
    return frozen(net)


def frozen(net: FeatureNet) -> FeatureNet:
    """Return the net in eval mode, without gradients."""
    return net.eval().requires_grad_(requires_grad=False)
