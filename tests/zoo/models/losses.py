"""Modules that end in a loss: regression, classification, contrastive and policy losses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import integers, normal, register, uniform


@register("cross_entropy", normal(8), integers(5), fast=True)
class CrossEntropy(nn.Module):
    """A classifier with its mean cross entropy, class weights included."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 5))
        self.register_buffer("weight", torch.tensor([1.0, 0.5, 2.0, 1.5, 0.7]))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), label, weight=self.weight)


@register("regression_losses", normal(6), normal(3))
class RegressionLosses(nn.Module):
    """Squared, absolute, smooth and Huber errors of one regressor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.CELU(0.8), nn.Linear(10, 3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.body(x)
        losses = (
            F.mse_loss(y, target),
            F.l1_loss(y, target),
            F.smooth_l1_loss(y, target, beta=0.7),
            F.huber_loss(y, target, delta=0.9),
        )
        return torch.stack(losses)


@register("segmentation_losses", normal(2, 8, 8), integers(2, 8, 8))
class SegmentationLosses(nn.Module):
    """Binary cross entropy, focal and Dice losses of a one-layer segmenter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        logits, target = self.conv(image).squeeze(1), mask.to(image.dtype)
        bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        focal = ((1 - torch.exp(-bce)) ** 2 * bce).mean()
        chance = torch.sigmoid(logits)
        overlap = (chance * target).sum((1, 2))
        dice = 1 - (2 * overlap + 1) / (chance.sum((1, 2)) + target.sum((1, 2)) + 1)
        return torch.stack([bce.mean(), focal, dice.mean()])


@register("simclr", normal(6), normal(6))
class SimClr(nn.Module):
    """Normalized temperature-scaled cross entropy between two views."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (F.normalize(self.body(view), dim=1) for view in (first, second))
        z = torch.cat([a, b], dim=0)
        logits = z @ z.t() / 0.5
        own = torch.eye(z.shape[0], dtype=torch.bool)
        logits = logits.masked_fill(own, -1e9)
        place = torch.arange(a.shape[0])
        label = torch.cat([place + a.shape[0], place])
        return F.cross_entropy(logits, label)


@register("metric_losses", normal(6), normal(6), normal(6))
class MetricLosses(nn.Module):
    """Triplet, cosine and Kullback-Leibler losses on shared embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        a, p, n = self.body(anchor), self.body(near), self.body(far)
        triplet = torch.relu((a - p).pow(2).sum(-1) - (a - n).pow(2).sum(-1) + 1.0).mean()
        cosine = (1 - F.cosine_similarity(a, p, dim=-1)).mean()
        kl = F.kl_div(F.log_softmax(a, dim=-1), F.softmax(n, dim=-1), reduction="batchmean")
        return torch.stack([triplet, cosine, kl])


@register("ppo", normal(6), integers(4), normal(), uniform(-2.0, -0.5), normal())
class Ppo(nn.Module):
    """Clipped policy loss, value loss and entropy of an actor-critic."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.policy, self.value = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(
        self, state: Tensor, action: Tensor, advantage: Tensor, old: Tensor, reward: Tensor
    ) -> Tensor:
        hidden = self.body(state)
        log_prob = F.log_softmax(self.policy(hidden), dim=-1)
        chosen = log_prob.gather(1, action.unsqueeze(1)).squeeze(1)
        ratio = torch.exp(chosen - old)
        clipped = torch.clamp(ratio, 0.8, 1.2) * advantage
        policy = -torch.min(ratio * advantage, clipped).mean()
        value = (self.value(hidden).squeeze(-1) - reward).pow(2).mean()
        entropy = -(log_prob.exp() * log_prob).sum(-1).mean()
        return policy + 0.5 * value - 0.01 * entropy


@register("sac", normal(6), normal(2))
class SacActor(nn.Module):
    """A squashed Gaussian policy with its log-probability and the smaller of two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.mean, self.log_std = nn.Linear(12, 2), nn.Linear(12, 2)
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)) for _ in range(2)
        )

    def forward(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        log_std = self.log_std(hidden).clamp(-4.0, 1.0)
        raw = self.mean(hidden) + noise * log_std.exp()
        log_prob = (-0.5 * noise.pow(2) - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        log_prob = log_prob - (2 * (math.log(2.0) - raw - F.softplus(-2 * raw))).sum(-1)
        x = torch.cat([state, torch.tanh(raw)], dim=-1)
        value = torch.minimum(self.critics[0](x), self.critics[1](x)).squeeze(-1)
        return 0.2 * log_prob - value, log_prob


@register("dueling_dqn", normal(6))
class DuelingDqn(nn.Module):
    """State value plus centered advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.value, self.advantage = nn.Linear(12, 1), nn.Linear(12, 4)

    def forward(self, state: Tensor) -> Tensor:
        hidden = self.body(state)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(dim=1, keepdim=True)


@register("activations", normal(10))
class Activations(nn.Module):
    """One linear layer read through every activation of torch that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 8)
        self.slope = nn.PReLU(8)
        self.acts = nn.ModuleList(
            [
                nn.ELU(0.9),
                nn.Hardshrink(0.3),
                nn.Hardsigmoid(),
                nn.Hardtanh(),
                nn.Hardswish(),
                nn.LeakyReLU(),
                nn.LogSigmoid(),
                nn.ReLU6(),
                nn.SELU(),
                nn.CELU(),
                nn.GELU(),
                nn.GELU("tanh"),
                nn.SiLU(),
                nn.Mish(),
                nn.Softplus(),
                nn.Softshrink(0.2),
                nn.Softsign(),
                nn.Tanh(),
                nn.Tanhshrink(),
                nn.Threshold(0.1, 0.5),
                nn.Softmin(-1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.stack([self.slope(y), *(act(y) for act in self.acts)], dim=1)
