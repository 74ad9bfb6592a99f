"""Convolutional classifiers: LeNet, ResNet, ResNeXt, DenseNet, SqueezeNet, ShuffleNet, U-Net ..."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import normal, register


def conv_bn(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, **options
) -> nn.Sequential:
    """Convolution without bias, BatchNorm, ReLU."""
    padding = options.pop("padding", kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


@register("lenet", normal(1, 28, 28))
class LeNet(nn.Module):
    """Two tanh convolutions with average pooling, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Linear(400, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 10)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(image).flatten(1))


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.first = conv_bn(inputs, outputs, 3, stride)
        self.conv = nn.Conv2d(outputs, outputs, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.project = None
        if stride != 1 or inputs != outputs:
            self.project = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project(x)
        return torch.relu(self.norm(self.conv(self.first(x))) + shortcut)


class ResNet(nn.Module):
    """Stem with an overlapping max pool, residual stages, global average pool."""

    def __init__(self, widths: tuple[int, ...] = (8, 8, 16), groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(
            *(Residual(a, b, 1 if a == b else 2, groups) for a, b in itertools.pairwise(widths))
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(image))).flatten(1))


@register("resnet", normal(3, 32, 32), batch_norm=True, fast=True)
def resnet() -> nn.Module:
    return ResNet()


@register("resnext", normal(3, 32, 32), batch_norm=True)
def resnext() -> nn.Module:
    return ResNet((8, 8, 16), groups=4)


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, convolution; the result is appended to the input's channels."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], dim=1)


@register("densenet", normal(3, 24, 24), batch_norm=True)
class DenseNet(nn.Module):
    """Two dense blocks with a halving transition between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.block1 = nn.Sequential(*(DenseLayer(8 + 4 * i, 4) for i in range(3)))
        self.transition = nn.Sequential(
            nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2, 2)
        )
        self.block2 = nn.Sequential(*(DenseLayer(10 + 4 * i, 4) for i in range(3)))
        self.norm = nn.BatchNorm2d(22)
        self.head = nn.Linear(22, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.block2(self.transition(self.block1(self.stem(image))))
        x = F.adaptive_avg_pool2d(torch.relu(self.norm(x)), (1, 1))
        return self.head(torch.flatten(x, 1))


class Fire(nn.Module):
    """A 1x1 squeeze, then 1x1 and 3x3 expansions side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.one = nn.Conv2d(squeeze, expand, 1)
        self.three = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)


@register("squeezenet", normal(3, 33, 33), dropout=True)
class SqueezeNet(nn.Module):
    """Fire modules, max pooling in ceil mode, a convolutional classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(12, 4, 8),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(16, 4, 8),
            nn.Dropout(0.5),
            nn.Conv2d(16, 10, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((1, 1)),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image).flatten(1)


@register("shufflenet", normal(3, 16, 16), batch_norm=True)
class ShuffleNet(nn.Module):
    """Split channels, transform one half, concatenate, shuffle the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 12, 3, 2)
        self.branches = nn.ModuleList(
            nn.Sequential(
                conv_bn(6, 6, 1),
                nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
                nn.BatchNorm2d(6),
                conv_bn(6, 6, 1),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(12, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for branch in self.branches:
            kept, changed = x.chunk(2, dim=1)
            x = torch.cat([kept, branch(changed)], dim=1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(x.mean([2, 3]))


@register("deeplab", normal(3, 24, 24), batch_norm=True)
class DeepLab(nn.Module):
    """Dilated convolutions at several rates, image pooling, bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3, 2)
        self.rates = nn.ModuleList(
            conv_bn(8, 6, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)
        )
        self.image_level = nn.Conv2d(8, 6, 1)
        self.classify = nn.Conv2d(24, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        pooled = self.image_level(F.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[2:])
        x = self.classify(torch.cat([*(rate(x) for rate in self.rates), pooled], dim=1))
        return F.interpolate(x, size=image.shape[2:], mode="bilinear", align_corners=False)


@register("yolo", normal(3, 16, 16), batch_norm=True)
class Yolo(nn.Module):
    """Leaky convolutions, an upsampled neck, boxes decoded on a grid with anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.1)
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.LeakyReLU(0.1)
        )
        self.head = nn.Conv2d(20, 2 * 7, 1)
        self.register_buffer("anchors", torch.tensor([[1.0, 1.5], [2.0, 1.0]]))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(image)
        coarse = F.interpolate(self.coarse(fine), scale_factor=2.0, mode="nearest")
        raw = self.head(torch.cat([fine, coarse], dim=1))
        n, _, h, w = raw.shape
        raw = raw.view(n, 2, 7, h, w).permute(0, 1, 3, 4, 2)
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        cell = torch.stack([xs, ys], dim=-1).to(raw.dtype)
        centre = (raw[..., :2].sigmoid() * 2 - 0.5 + cell) * 2
        size = raw[..., 2:4].exp() * self.anchors.view(1, 2, 1, 1, 2)
        boxes = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
        return boxes.flatten(1, 3), raw[..., 4:].sigmoid().flatten(1, 3)


@register("unet", normal(1, 16, 16), batch_norm=True, fast=True)
class UNet(nn.Module):
    """Two levels down by max pooling, up by transposed convolutions, skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_bn(1, 6), conv_bn(6, 12)
        self.bottom = conv_bn(12, 16)
        self.up2 = nn.ConvTranspose2d(16, 12, 2, 2)
        self.merge2 = conv_bn(24, 12)
        self.up1 = nn.ConvTranspose2d(12, 6, 2, 2)
        self.merge1 = conv_bn(12, 6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        middle = self.down2(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(middle, 2))
        x = self.merge2(torch.cat([self.up2(x), middle], 1))
        return self.head(self.merge1(torch.cat([self.up1(x), fine], 1)))


@register("video3d", normal(2, 6, 12, 12), batch_norm=True)
class Video3d(nn.Module):
    """3-d convolutions and pooling over time, height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(2, 6, 3, padding=1),
            nn.BatchNorm3d(6),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(6, 8, (1, 3, 3), padding=(0, 1, 1)),
            nn.ReLU(),
            nn.AvgPool3d((3, 2, 2)),
        )
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, clip: Tensor) -> Tensor:
        return self.head(self.body(clip).flatten(1))
