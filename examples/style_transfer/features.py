"""The fixed net whose features say what a picture shows and how it is painted.

Without a network there is no pre-trained VGG: a small net of the same make learns to tell the
places of a few pictures apart, whatever their colours, size and direction (so that its features
are of edges, textures and shapes). Who has torchvision's VGG16 weights can use those instead.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from pictures import load, planes
from torch import Tensor, nn

import onnxtrain
from onnxtrain.torch import from_torch

SMALL = (16, 16, "M", 32, 32, "M", 48, 48, "M", 64)
VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512)


class FeatureNet(nn.Module):
    """Convolutions as in VGG: the features after the last one of each size."""

    def __init__(self, layout: tuple[int | str, ...] = SMALL):
        super().__init__()
        layers: list[nn.Module] = []
        self.taps: list[int] = []
        given = 3
        for kind, following in itertools.pairwise((*layout, "M")):
            if isinstance(kind, str):
                layers.append(nn.MaxPool2d(2))
                continue
            conv = nn.Conv2d(given, kind, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)
            layers += [conv, nn.ReLU()]
            given = kind
            if isinstance(following, str):
                self.taps.append(len(layers) - 1)
        self.features = nn.Sequential(*layers)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255)
        self.register_buffer("spread", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255)

    def forward(self, image: Tensor) -> list[Tensor]:
        """Return the features of a picture of 0..255, those of large pictures first."""
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
    net = FeatureNet(VGG16)
    wanted = net.features.state_dict()
    net.features.load_state_dict({name: state[f"features.{name}"] for name in wanted})
    return frozen(net)


def frozen(net: FeatureNet) -> FeatureNet:
    """Return the net, never to be trained again."""
    return net.eval().requires_grad_(requires_grad=False)


class _Places(nn.Module):
    """Which place of which picture a patch is from."""

    def __init__(self, features: FeatureNet, places: int):
        super().__init__()
        self.body = features
        self.head = nn.Linear(features(torch.zeros(1, 3, 16, 16))[-1].shape[1], places)

    def forward(self, patch: Tensor) -> Tensor:
        """Return scores of the places."""
        return self.head(self.body(patch)[-1].mean((2, 3)))


def places(count: int, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return patches with the number of their place, in altered colour, direction and zoom.

    The places are the tiles, 4 x 4 each, of scikit-learn's two pictures and of the mosaic.
    """
    pictures = [load(name, 4 * size) for name in ("china", "flower", "mosaic")]
    patches, labels = [], []
    for _ in range(count):
        which, row, column = rng.integers((len(pictures), 4, 4))
        picture = pictures[which]
        side = rng.integers(size * 2 // 3, size + 1)
        here = [int(k * (n / 4) + rng.uniform(0, n / 4 - side)) for k, n in zip(
            (row, column), picture.shape[:2], strict=True)]  # fmt: skip
        patch = picture[here[0] : here[0] + side, here[1] : here[1] + side]
        index = np.arange(size) * side // size
        patch = np.rot90(patch[index][:, index], rng.integers(4))
        patch = patch * rng.uniform(0.7, 1.3, 3) + rng.uniform(-30, 30, 3)
        patches.append(patch + rng.normal(0, 6, patch.shape))
        labels.append(which * 16 + row * 4 + column)
    return planes(np.stack(patches)), np.asarray(labels)


def train_features(steps: int = 180, batch: int = 32, size: int = 32, seed: int = 0) -> FeatureNet:
    """Return a small feature net, trained with onnxtrain; every layer gives 1 on average."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    net = FeatureNet()
    module = _Places(net, 48)
    built = onnxtrain.build(
        from_torch(module, torch.zeros(2, 3, size, size)),
        loss="cross_entropy",
        optimizer="adamw:lr=0.002",
        metrics=["accuracy"],
    )
    trainer = onnxtrain.Trainer(built)
    if steps:
        rows = places(batch * min(steps, 60), size, rng)
        epochs = -(-steps * batch // len(rows[0]))
        trainer.fit(rows, epochs=epochs, batch_size=batch, schedule="cosine")
    module.load_state_dict(
        {name: torch.from_numpy(trainer.parameters[name]) for name, _ in module.named_parameters()},
        strict=False,
    )
    return frozen(_levelled(net, places(16, 2 * size, rng)[0]))


@torch.no_grad()
def _levelled(net: FeatureNet, patches: np.ndarray) -> FeatureNet:
    """Scale every convolution so that its features are 1 on average."""
    x = (torch.from_numpy(patches) - net.mean) / net.spread
    for layer in net.features:
        if isinstance(layer, nn.Conv2d):
            factor = 1 / torch.relu(layer(x)).mean()
            layer.weight *= factor
            layer.bias *= factor
        x = layer(x)
    return net
