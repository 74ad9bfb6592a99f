"""What is minimised: content and style, as one module that gives its loss."""

from __future__ import annotations

import torch
from features import FeatureNet
from net import TransformerNet
from torch import Tensor, nn

CONTENT = (0, 1)
"""The sizes of features (0 is the largest) at which contents are compared."""


def gram(features: Tensor) -> Tensor:
    """Return how channels go together: [N, C, H, W] -> [N, C, C]."""
    n, c, h, w = features.shape
    flat = features.reshape(n, c, h * w)
    return flat @ flat.transpose(1, 2) / (c * h * w)


class StyleLoss(nn.Module):
    """The styled picture's distance from the picture in content, and from the style in style.

    Distances of Gram matrices are relative to those of the style: at 1 a picture is as far from
    the style as one without features, whatever net the features are of.
    """

    def __init__(
        self,
        net: TransformerNet,
        features: FeatureNet,
        style: Tensor,
        content_weight: float,
        style_weight: float,
    ):
        super().__init__()
        self.net, self.features = net, features
        self.content_weight, self.style_weight = content_weight, style_weight
        with torch.no_grad():
            self.grams = [gram(feature) for feature in features(style)]
        self.sizes = [float(wanted.square().mean()) for wanted in self.grams]

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and the two that it is the weighted sum of."""
        ours, given = self.features(self.net(image)), self.features(image)
        content = torch.stack([(ours[i] - given[i]).square().mean() for i in CONTENT]).mean()
        pairs = zip(ours, self.grams, self.sizes, strict=True)
        style = torch.stack([(gram(y) - g).square().mean() / n for y, g, n in pairs]).sum()
        return self.content_weight * content + self.style_weight * style, content, style
