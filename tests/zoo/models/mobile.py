"""Efficient CNNs: MobileNetV2, MobileNetV3, EfficientNet, ConvNeXt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import normal, register


class SqueezeExcite(nn.Module):
    """Channel weights from the image mean; ``gate`` bounds them."""

    def __init__(self, channels: int, hidden: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, hidden, 1)
        self.expand = nn.Conv2d(hidden, channels, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.act(self.reduce(weight))))


class InvertedResidual(nn.Module):
    """Expand by 1x1, depthwise 3x3 or 5x5, optional squeeze-excite, linear 1x1."""

    def __init__(self, inputs, outputs, stride, kernel, act, excite=None, ratio=2) -> None:
        super().__init__()
        hidden = inputs * ratio
        depthwise = nn.Conv2d(
            hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False
        )
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act(),
            depthwise,
            nn.BatchNorm2d(hidden),
            act(),
            nn.Identity() if excite is None else excite(hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class MobileNet(nn.Module):
    """Stem, inverted residuals, last 1x1, pooled classifier."""

    def __init__(self, act, excite=None, last_act=None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), act())
        self.blocks = nn.Sequential(
            InvertedResidual(8, 8, 1, 3, act, excite),
            InvertedResidual(8, 12, 2, 5, act, excite),
            InvertedResidual(12, 12, 1, 3, act),
        )
        self.last = nn.Sequential(nn.Conv2d(12, 24, 1, bias=False), nn.BatchNorm2d(24), act())
        self.head = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(24, 16), (last_act or act)(), nn.Linear(16, 10)
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(image)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


@register("mobilenet_v2", normal(3, 16, 16), batch_norm=True, dropout=True)
def mobilenet_v2() -> nn.Module:
    return MobileNet(nn.ReLU6)


@register("mobilenet_v3", normal(3, 16, 16), batch_norm=True, dropout=True)
def mobilenet_v3() -> nn.Module:
    return MobileNet(
        nn.Hardswish, lambda width: SqueezeExcite(width, 4, nn.ReLU(), nn.Hardsigmoid())
    )


@register("efficientnet", normal(3, 16, 16), batch_norm=True, dropout=True)
def efficientnet() -> nn.Module:
    return MobileNet(nn.SiLU, lambda width: SqueezeExcite(width, 4, nn.SiLU(), nn.Sigmoid()))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over channels, a GELU MLP, a learned scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(nn.functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image in channels-first order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register("convnext", normal(3, 16, 16))
class ConvNeXt(nn.Module):
    """Patch stem, two stages with a strided convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), ChannelNorm(8, eps=1e-6))
        self.stage1 = ConvNeXtBlock(8)
        self.down = nn.Sequential(ChannelNorm(8, eps=1e-6), nn.Conv2d(8, 12, 2, 2))
        self.stage2 = ConvNeXtBlock(12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(image))))
        return self.head(self.norm(x.mean([-2, -1])))
