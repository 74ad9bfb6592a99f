"""What is minimised: content, style and restoration, as one module that gives its loss.

Nothing here was trained on other pictures. The style is the distribution of its patches, seen
through random filters; and pieces of the style picture itself, made rough, have to be restored,
which is what teaches the net quickly to draw tiles or strokes.
"""

from __future__ import annotations

import numpy as np
import torch
from features import FeatureNet
from net import TransformerNet
from stylist import LIGHT, Rough
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

SCALES = 3
"""Patches are compared at full size, half and a quarter of it."""
FILTERS = {1: 6, 3: 14, 7: 16}
"""How many random filters of each size there are: for colours, edges, and shapes."""
COARSE = 8
"""Contents are compared in light and dark of squares of so many pixels."""
CONTRAST = 0.8
"""How much of a photo's contrast is asked for: a style has its own."""
SHARES = {"content": 15.0, "restoration": 6.0, "range": 2.0}
"""What makes the parts about equally large where every weight is 1."""


def filters(rng: np.random.Generator) -> list[np.ndarray]:
    """Draw filters of length 1; those for edges do not see what is even."""
    drawn = []
    for size, count in FILTERS.items():
        w = rng.standard_normal((count, 3, size, size))
        if size == 3:
            w -= w.mean((2, 3), keepdims=True)
        drawn.append((w / np.sqrt((w**2).sum((1, 2, 3), keepdims=True))).astype(np.float32))
    return drawn


def patch_distance(ours: Tensor, style: Tensor, drawn: list[Tensor]) -> Tensor:
    """Return how far two distributions of patches are apart, along the filters.

    Along one filter it is how far sorted responses are from each other, in units of the spread of
    the style's: what has to be moved to make one distribution the other (a sliced Wasserstein
    distance).
    """
    distances = []
    for scale in range(SCALES):
        for w in drawn:
            a, b = (_sorted_responses(x, w) for x in (ours, style))
            distances.append(((a - b).abs().mean(1) / (b.std(1) + 0.02)).mean())
        if scale + 1 < SCALES:
            ours, style = avg_pool2d(ours, 2), avg_pool2d(style, 2)
    return torch.stack(distances).sum() / len(drawn)


def _sorted_responses(pictures: Tensor, w: Tensor) -> Tensor:
    """Return the responses of each filter in all pictures, the smallest first: [filters, n]."""
    responses = conv2d(pictures, w)
    if responses.shape[-1] > 40:  # neighbours tell the same: every other one will do
        responses = responses[..., ::2, ::2]
    return responses.transpose(0, 1).flatten(1).sort(1).values


def coarse_light(pictures: Tensor) -> Tensor:
    """Return light and dark of large squares, without the brightness of the whole."""
    light = (pictures * torch.tensor(LIGHT).view(1, 3, 1, 1)).sum(1, keepdim=True)
    squares = avg_pool2d(light, COARSE)
    return squares - squares.mean((2, 3), keepdim=True)


def gram(features: Tensor) -> Tensor:
    """Return how channels go together: [N, C, H, W] -> [N, C, C]."""
    n, c, h, w = features.shape
    flat = features.reshape(n, c, h * w)
    return flat @ flat.transpose(1, 2) / (c * h * w)


class StyleLoss(nn.Module):
    """The painted picture's distance from the picture in content, and from the style in style.

    ``features`` is a trained net, if there is one: then Gram matrices of its features count too.
    """

    def __init__(
        self,
        net: TransformerNet,
        content_weight: float,
        style_weight: float,
        features: FeatureNet | None = None,
    ):
        super().__init__()
        self.net, self.rough = net, Rough()
        self.content_weight, self.style_weight = content_weight, style_weight
        self.features = features

    def forward(
        self, image: Tensor, style: Tensor, layout: Tensor, *drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the loss, and the parts of it: content, style, restoration."""
        count = image.shape[0]
        given = torch.cat([self.rough(image) + layout, self.rough(style)])
        made = self.net(given) / 255
        painted, restored = made[:count], made[count:]
        picture, wanted = image / 255, style / 255
        content = (coarse_light(painted) - CONTRAST * coarse_light(picture)).square().mean()
        style_distance = patch_distance(painted, wanted, list(drawn))
        if self.features is not None:
            style_distance = style_distance + self._gram_distance(painted, wanted)
        restoration = (restored - wanted).abs().mean()
        outside = (torch.relu(made - 1) + torch.relu(-made)).mean()
        loss = (
            self.content_weight * SHARES["content"] * content
            + self.style_weight * style_distance
            + SHARES["restoration"] * restoration
            + SHARES["range"] * outside
        )
        return loss, content, style_distance, restoration

    def _gram_distance(self, painted: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of Gram matrices, relative to those of the style."""
        assert self.features is not None
        pairs = zip(self.features(painted * 255), self.features(wanted * 255), strict=True)
        grams = [(gram(a), gram(b)) for a, b in pairs]
        return torch.stack([(a - b).square().mean() / b.square().mean() for a, b in grams]).sum()
