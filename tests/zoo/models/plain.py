"""Fully connected networks: MLP, MLP-Mixer, autoencoder, SIREN, NeRF, capsules, hypernetwork ..."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import normal, register, uniform


@register("mlp", normal(12), dropout=True, fast=True)
def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(24, 16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


@register("autoencoder", normal(32))
class Autoencoder(nn.Module):
    """A bottleneck of four numbers with a sigmoid reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 4))
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 32), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(x)
        return self.decode(code), code


class MixerBlock(nn.Module):
    """An MLP across patches, then one across channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 12), nn.GELU(), nn.Linear(12, patches))
        self.channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


@register("mlp_mixer", normal(3, 16, 16))
class MlpMixer(nn.Module):
    """Patches by a strided convolution, mixer blocks, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 16), MixerBlock(16, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


@register("siren", uniform(-1.0, 1.0, 2))
class Siren(nn.Module):
    """Sine activations with the first layer's frequency raised."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, 3)

    def forward(self, position: Tensor) -> Tensor:
        x = position
        for frequency, layer in zip((10.0, 3.0), self.layers, strict=True):
            x = torch.sin(frequency * layer(x))
        return self.head(x)


@register("nerf", normal(3), normal(3), fast=True)
class Nerf(nn.Module):
    """Positional encoding, density and color along each ray, volume rendering."""

    def __init__(self, samples: int = 8, octaves: int = 3) -> None:
        super().__init__()
        self.register_buffer("depth", torch.linspace(0.5, 2.5, samples))
        self.register_buffer("bands", math.pi * 2.0 ** torch.arange(octaves))
        self.body = nn.Sequential(
            nn.Linear(6 * octaves + 3, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()
        )
        self.density = nn.Linear(24, 1)
        self.colour = nn.Linear(27, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        direction = F.normalize(direction, dim=-1)
        points = origin[:, None, :] + direction[:, None, :] * self.depth[None, :, None]
        angles = (points[..., None, :] * self.bands[:, None]).flatten(-2)
        x = self.body(torch.cat([points, angles.sin(), angles.cos()], dim=-1))
        density = F.softplus(self.density(x).squeeze(-1))
        view = direction[:, None, :].expand(-1, points.shape[1], -1)
        colour = torch.sigmoid(self.colour(torch.cat([x, view], dim=-1)))
        optical = density * 0.25
        blocked = torch.cumsum(optical, dim=-1) - optical
        weight = torch.exp(-blocked) * (1 - torch.exp(-optical))
        return (weight[..., None] * colour).sum(-2), (weight * self.depth).sum(-1)


@register("capsule", normal(1, 12, 12))
class Capsules(nn.Module):
    """Capsules with two rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, 2)
        self.votes = nn.Parameter(0.2 * torch.randn(32, 3, 6, 4))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x * x).sum(-1, keepdim=True)
        return x * square / (1 + square) / torch.sqrt(square + 1e-8)

    def forward(self, image: Tensor) -> Tensor:
        primary = self.conv(image).view(image.shape[0], 2, 4, 16).permute(0, 1, 3, 2)
        primary = self.squash(primary.reshape(image.shape[0], 32, 4))
        votes = torch.einsum("icdk,bik->bicd", self.votes, primary)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(2):
            share = torch.softmax(logits, dim=2)
            out = self.squash(torch.einsum("bic,bicd->bcd", share, votes))
            logits = logits + torch.einsum("bicd,bcd->bic", votes, out)
        return torch.linalg.vector_norm(out, dim=-1)


@register("hypernetwork", normal(6), normal(4))
class HyperNetwork(nn.Module):
    """One net writes the weights with which each sample is transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6 * 5 + 5))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight, bias = self.weights(task).split([30, 5], dim=-1)
        return torch.baddbmm(bias.unsqueeze(1), x.unsqueeze(1), weight.view(-1, 6, 5)).squeeze(1)


@register("lora", normal(12))
class Lora(nn.Module):
    """Linear layers with a scaled low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 6)])
        self.down = nn.ParameterList([torch.randn(2, 12) / 4, torch.randn(2, 16) / 4])
        self.up = nn.ParameterList([torch.randn(16, 2) / 4, torch.randn(6, 2) / 4])

    def forward(self, x: Tensor) -> Tensor:
        for index, base in enumerate(self.base):
            x = base(x) + 0.5 * (x @ self.down[index].T) @ self.up[index].T
            x = F.leaky_relu(x, 0.2) if index == 0 else x
        return x


@register("deep_sets", normal(7, 5))
class DeepSets(nn.Module):
    """Sum, mean, max and spread over the set, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(5, 12), nn.Softplus(), nn.Linear(12, 8))
        self.all = nn.Sequential(nn.Linear(32, 12), nn.Mish(), nn.Linear(12, 3))

    def forward(self, items: Tensor) -> Tensor:
        x = self.each(items)
        spread = torch.sqrt(x.var(dim=1) + 1e-5)
        return self.all(torch.cat([x.sum(1) / 7, x.mean(1), x.amax(1), spread], dim=-1))
