"""Recommenders and embeddings: DLRM, NCF, DeepFM, word2vec, two towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import integers, normal, register


class Dlrm(nn.Module):
    """Dense features and bags of ids, their pairwise dot products, a click probability."""

    def __init__(self, bag: type[nn.Module]) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
        self.bags = nn.ModuleList(bag(11, 6) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("pairs", torch.tril_indices(3, 3, offset=-1))

    def forward(self, dense: Tensor, first: Tensor, second: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, self.bags[0](first), self.bags[1](second)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([x, dots], dim=1))).squeeze(-1)


class SumBag(nn.Embedding):
    """The sum of the ids' embeddings, written as a plain sum."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index).sum(dim=1)


@register("dlrm", normal(5), integers(11, 3), integers(11, 3))
def dlrm() -> nn.Module:
    return Dlrm(lambda rows, width: nn.EmbeddingBag(rows, width, mode="sum"))


@register("dlrm_sum", normal(5), integers(11, 3), integers(11, 3))
def dlrm_sum() -> nn.Module:
    return Dlrm(SumBag)


@register("ncf", integers(9), integers(13))
class NeuralCollaborativeFiltering(nn.Module):
    """A product of factors beside an MLP on concatenated embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 6), nn.Embedding(13, 6)
        self.user_mlp, self.item_mlp = nn.Embedding(9, 6), nn.Embedding(13, 6)
        self.mlp = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU())
        self.head = nn.Linear(12, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.user(user) * self.item(item)
        deep = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1))
        return torch.sigmoid(self.head(torch.cat([product, deep], dim=-1)))


@register("deepfm", integers(30, 5))
class DeepFm(nn.Module):
    """Factorisation machine (square of sum minus sum of squares) plus a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(30, 1), nn.Embedding(30, 4)
        self.deep = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, field: Tensor) -> Tensor:
        x = self.factors(field)
        pairs = 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(-1, keepdim=True)
        total = self.bias + self.linear(field).sum(1) + pairs + self.deep(x.flatten(1))
        return total.sigmoid()


@register("word2vec", integers(15), integers(15), integers(15, 4))
class Word2Vec(nn.Module):
    """Skip-gram with negative samples; the output is the loss of each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.context = nn.Embedding(15, 6), nn.Embedding(15, 6)

    def forward(self, word: Tensor, near: Tensor, wrong: Tensor) -> Tensor:
        v = self.center(word)
        positive = F.logsigmoid((v * self.context(near)).sum(-1))
        negative = F.logsigmoid(-torch.bmm(self.context(wrong), v.unsqueeze(2)).squeeze(2))
        return -(positive + negative.sum(-1))


@register("two_towers", normal(6), integers(12))
class TwoTowers(nn.Module):
    """Users and items as unit vectors; in-batch softmax over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(6, 10), nn.SELU(), nn.Linear(10, 5))
        self.item = nn.Embedding(12, 5, max_norm=None)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, v = F.normalize(self.user(user), dim=-1), F.normalize(self.item(item), dim=-1)
        return torch.logsumexp(u @ v.T / 0.1, dim=1) - (u * v).sum(-1) / 0.1
