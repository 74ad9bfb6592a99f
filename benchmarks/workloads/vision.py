"""Nets over images and vectors, in plain torch."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Module:
    """Return 784-128-10 with a ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    """Return two 3x3 convolutions, a 2x2 max pool and two dense layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.way = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.way(x))


class ResNet18(nn.Module):
    """ResNet-18: 7x7 stem, max pool, four stages of two blocks, average, dense."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(channels, out, stride), BasicBlock(out, out, 1)]
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Inverted(nn.Module):
    """Inverted residual block: expand, depthwise convolution, project."""

    def __init__(self, channels: int, out: int, stride: int, widen: int) -> None:
        super().__init__()
        hidden = channels * widen
        layers: list[nn.Module] = []
        if widen != 1:
            layers += [
                nn.Conv2d(channels, hidden, 1, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU6(),
            ]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]
        self.layers = nn.Sequential(*layers)
        self.around = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        return x + self.layers(x) if self.around else self.layers(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 at width 1, without dropout."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        blocks: list[nn.Module] = []
        channels = 32
        for widen, out, count, stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for i in range(count):
                blocks.append(Inverted(channels, out, stride if i == 0 else 1, widen))
                channels = out
        head = [nn.Conv2d(channels, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
        self.features = nn.Sequential(*stem, *blocks, *head)
        self.fc = nn.Linear(1280, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.fc(self.features(x).mean((2, 3)))


class ViTBlock(nn.Module):
    """Attention and a dense part, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=2)
        q, k, v = (
            t.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.norm2(x))


class ViT(nn.Module):
    """ViT-tiny: width 192, 3 heads, 12 layers, patches of 4x4 and a class token."""

    def __init__(self, classes: int = 100, width: int = 192, layers: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(width, 3) for _ in range(layers)))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        patches = self.patch(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        y = self.blocks(torch.cat([token, patches], dim=1) + self.places)
        return self.fc(self.norm(y[:, 0]))


class MergingViT(nn.Module):
    """Two stages of a ViT; patches are merged two by two in between, as in Swin."""

    def __init__(self, classes: int = 100, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(*(ViTBlock(width, 3) for _ in range(layers)))
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)
        self.second = nn.Sequential(*(ViTBlock(2 * width, 6) for _ in range(layers)))
        self.norm, self.fc = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        y = self.patch(x)
        rows, columns = y.shape[2:]
        y = self.first(y.flatten(2).transpose(1, 2)).unflatten(1, (rows, columns))
        parts = [y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        y = self.second(self.merge(torch.cat(parts, dim=-1)).flatten(1, 2))
        return self.fc(self.norm(y.mean(dim=1)))
