"""The training loss: content, style and restoration, as one module that returns its loss.

No pretrained network is used. The style is the distribution of patches under random filters: of the
whole image and, for edge filters, of every quarter. In addition, the network has to restore crops
of the degraded style image, which quickly teaches it to draw tiles or strokes.
"""

from __future__ import annotations

import numpy as np
import torch
from features import FeatureNet
from net import TransformerNet
from stylist import CONTRAST, LIGHT, Preprocess
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

SCALES = 3
"""Number of resolutions: full, half and quarter."""
FILTERS = {1: 6, 3: 14, 7: 16}
"""Number of random filters by size: for colors, edges and shapes."""
COARSE = 8
"""Side of the blocks, in pixels, whose brightness is compared for the content loss."""
SCALE_FACTORS = {"content": 20.0, "quarters": 1.0, "restoration": 6.0, "range": 2.0}
"""Factors that make the terms about equally large if all weights are 1."""


def filters(rng: np.random.Generator) -> list[np.ndarray]:
    """Return random filters with unit norm; edge filters have zero mean."""
    drawn = []
    for size, count in FILTERS.items():
        w = rng.standard_normal((count, 3, size, size))
        if size == 3:
            w -= w.mean((2, 3), keepdims=True)
        drawn.append((w / np.sqrt((w**2).sum((1, 2, 3), keepdims=True))).astype(np.float32))
    return drawn


def patch_distance(ours: Tensor, style: Tensor, drawn: list[Tensor]) -> Tensor:
    """Return the sliced Wasserstein distance of two distributions of patches.

    For each filter, this is the mean difference of the sorted responses, relative to the standard
    deviation of the style's responses.
    """
    distances = []
    for scale in range(SCALES):
        for w in drawn:
            a, b = (_sorted_responses(x, w) for x in (ours, style))
            distances.append(((a - b).abs().mean(1) / (b.std(1) + 0.02)).mean())
        if scale + 1 < SCALES:
            ours, style = avg_pool2d(ours, 2), avg_pool2d(style, 2)
    return torch.stack(distances).sum() / len(drawn)


def _sorted_responses(images: Tensor, w: Tensor) -> Tensor:
    """Return the sorted responses of each filter in all images: [filters, n]."""
    responses = conv2d(images, w)
    if responses.shape[-1] > 40:  # neighboring responses are similar: subsample
        responses = responses[..., ::2, ::2]
    return responses.transpose(0, 1).flatten(1).sort(1).values


def quarter_distance(ours: Tensor, style: Tensor, w: Tensor) -> Tensor:
    """Return the edge distance of each quarter of our images to the style's average quarter.

    The distribution over whole images can match if one half has all the tiles; this loss requires
    tiles in dark and uniform regions too. It ignores the strongest edges, which dark tiles cannot
    have.
    """
    distances = []
    for scale in range(2):
        a, b = (conv2d(quarters(x), w).flatten(2).sort(2).values for x in (ours, style))
        outer = a.shape[2] // 10
        a, b = a[..., outer:-outer], b[..., outer:-outer]
        average = b.mean(0, keepdim=True)
        distances.append(((a - average).abs().mean(2) / (average.std(2) + 0.02)).mean())
        if scale == 0:
            ours, style = avg_pool2d(ours, 2), avg_pool2d(style, 2)
    return torch.stack(distances).mean()


def quarters(images: Tensor) -> Tensor:
    """Return the quarters of images: [N, C, H, W] -> [4 * N, C, H / 2, W / 2]."""
    height, width = images.shape[2] // 2, images.shape[3] // 2
    halves = torch.cat([images[:, :, :height], images[:, :, height:]])
    return torch.cat([halves[..., :width], halves[..., width:]])


def coarse_brightness(images: Tensor) -> Tensor:
    """Return the brightness of blocks, relative to the mean brightness."""
    light = (images * torch.tensor(LIGHT).view(1, 3, 1, 1)).sum(1, keepdim=True)
    blocks = avg_pool2d(light, COARSE)
    return blocks - blocks.mean((2, 3), keepdim=True)


def gram(features: Tensor) -> Tensor:
    """Return Gram matrices: [N, C, H, W] -> [N, C, C]."""
    n, c, h, w = features.shape
    flat = features.reshape(n, c, h * w)
    return flat @ flat.transpose(1, 2) / (c * h * w)


class StyleLoss(nn.Module):
    """Content distance to the image plus style distance to the style image.

    With a pretrained ``features`` network, the Gram matrices of its features are compared too.
    """

    def __init__(
        self,
        net: TransformerNet,
        content_weight: float,
        style_weight: float,
        features: FeatureNet | None = None,
    ):
        super().__init__()
        self.net, self.preprocess = net, Preprocess()
        self.content_weight, self.style_weight = content_weight, style_weight
        self.features = features

    def forward(
        self, image: Tensor, layout: Tensor, style: Tensor, own: Tensor, *drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the loss and its terms: content, style, restoration."""
        count = image.shape[0]
        inputs = torch.cat([self.preprocess(image, layout, CONTRAST), self.preprocess(style, own)])
        outputs = self.net(inputs) / 255
        stylized, restored = outputs[:count], outputs[count:]
        original, target = image / 255, style / 255
        content = (
            (coarse_brightness(stylized) - CONTRAST * coarse_brightness(original)).square().mean()
        )
        style_distance = patch_distance(stylized, target, list(drawn))
        by_quarter = quarter_distance(stylized, target, drawn[1])
        style_distance = style_distance + SCALE_FACTORS["quarters"] * by_quarter
        if self.features is not None:
            style_distance = style_distance + self._gram_distance(stylized, target)
        restoration = (restored - target).abs().mean()
        outside = (torch.relu(outputs - 1) + torch.relu(-outputs)).mean()
        loss = (
            self.content_weight * SCALE_FACTORS["content"] * content
            + self.style_weight * style_distance
            + SCALE_FACTORS["restoration"] * restoration
            + SCALE_FACTORS["range"] * outside
        )
        return loss, content, style_distance, restoration

    def _gram_distance(self, stylized: Tensor, target: Tensor) -> Tensor:
        """Return the relative distance of the Gram matrices to the style's."""
        assert self.features is not None
        pairs = zip(self.features(stylized * 255), self.features(target * 255), strict=True)
        grams = [(gram(a), gram(b)) for a, b in pairs]
        return torch.stack([(a - b).square().mean() / b.square().mean() for a, b in grams]).sum()
