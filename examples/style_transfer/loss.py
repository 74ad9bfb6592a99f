"""What is minimised: content, style and restoration, as one module that gives its loss.

Nothing here was trained on other pictures. The style is the distribution of its patches, seen
through random filters: in the whole and, where edges are concerned, in every quarter. And pieces
of the style picture itself, made rough, have to be restored, which is what teaches the net quickly
to draw tiles or strokes.
"""

from __future__ import annotations

import numpy as np
import torch
from features import FeatureNet
from net import TransformerNet
from stylist import CONTRAST, LIGHT, Given
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

SCALES = 3
"""Patches are compared at full size, half and a quarter of it."""
FILTERS = {1: 6, 3: 14, 7: 16}
"""How many random filters of each size there are: for colours, edges, and shapes."""
COARSE = 8
"""Contents are compared in light and dark of squares of so many pixels."""
SHARES = {"content": 20.0, "everywhere": 1.0, "restoration": 6.0, "range": 2.0}
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


def everywhere(ours: Tensor, style: Tensor, w: Tensor) -> Tensor:
    """Return how far each quarter of our pictures is from the style's average one in its edges.

    Patches of whole pictures may be right where one half has all tiles; this asks for them in
    dark and in even places too. The strongest edges do not count: dark tiles cannot have them.
    """
    distances = []
    for scale in range(2):
        a, b = (conv2d(quarters(x), w).flatten(2).sort(2).values for x in (ours, style))
        outer = a.shape[2] // 10
        a, b = a[..., outer:-outer], b[..., outer:-outer]
        usual = b.mean(0, keepdim=True)
        distances.append(((a - usual).abs().mean(2) / (usual.std(2) + 0.02)).mean())
        if scale == 0:
            ours, style = avg_pool2d(ours, 2), avg_pool2d(style, 2)
    return torch.stack(distances).mean()


def quarters(pictures: Tensor) -> Tensor:
    """Return the quarters of pictures: [N, C, H, W] -> [4 * N, C, H / 2, W / 2]."""
    height, width = pictures.shape[2] // 2, pictures.shape[3] // 2
    halves = torch.cat([pictures[:, :, :height], pictures[:, :, height:]])
    return torch.cat([halves[..., :width], halves[..., width:]])


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
        self.net, self.given = net, Given()
        self.content_weight, self.style_weight = content_weight, style_weight
        self.features = features

    def forward(
        self, image: Tensor, layout: Tensor, style: Tensor, own: Tensor, *drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the loss, and the parts of it: content, style, restoration."""
        count = image.shape[0]
        given = torch.cat([self.given(image, layout, CONTRAST), self.given(style, own)])
        made = self.net(given) / 255
        painted, restored = made[:count], made[count:]
        picture, wanted = image / 255, style / 255
        content = (coarse_light(painted) - CONTRAST * coarse_light(picture)).square().mean()
        style_distance = patch_distance(painted, wanted, list(drawn))
        even = everywhere(painted, wanted, drawn[1])
        style_distance = style_distance + SHARES["everywhere"] * even
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
