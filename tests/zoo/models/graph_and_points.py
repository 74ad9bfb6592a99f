"""Graphs, point clouds and geometry: GCN, GAT, PointNet, PointNet++-like, spatial transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import integers, normal, register

ONE_GRAPH = "the inputs are one graph: nodes and edges, no batch axis"


def degree(target: Tensor, like: Tensor) -> Tensor:
    """How many edges end in each node, at least one."""
    ones = torch.ones_like(target, dtype=like.dtype)
    return torch.zeros_like(like[:, 0]).scatter_add(0, target, ones).clamp(min=1)


@register(
    "gcn",
    normal(9, 6, batched=False),
    integers(9, 2, 20, batched=False),
    static=ONE_GRAPH,
    fast=True,
)
class Gcn(nn.Module):
    """Two graph convolutions: gather along edges, scatter-add into nodes, divide by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        total = torch.zeros_like(x).index_add(0, target, x[source])
        return x + total / degree(target, x).unsqueeze(-1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = F.elu(self.spread(self.first(nodes), edges))
        return F.log_softmax(self.spread(self.second(x), edges), dim=-1)


@register("gat", normal(9, 6, batched=False), integers(9, 2, 20, batched=False), static=ONE_GRAPH)
class Gat(nn.Module):
    """Attention over each node's edges: scatter-max, exp, scatter-sum, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8, bias=False)
        self.source = nn.Parameter(torch.randn(1, 2, 4) / 2)
        self.target = nn.Parameter(torch.randn(1, 2, 4) / 2)
        self.head = nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        x = self.linear(nodes).view(-1, 2, 4)
        score = (x * self.source).sum(-1)[source] + (x * self.target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        index = target.unsqueeze(-1).expand_as(score)
        start = torch.full_like(x[..., 0], -1e9)
        highest = start.scatter_reduce(0, index, score, reduce="amax")
        weight = torch.exp(score - highest[target])
        total = torch.zeros_like(highest).scatter_add(0, index, weight)
        share = weight / (total[target] + 1e-9)
        mixed = torch.zeros_like(x).index_add(0, target, share.unsqueeze(-1) * x[source])
        return self.head(F.elu(mixed.flatten(1)))


@register("graph_sage", normal(7, 5), integers(2, 7, 7))
class DenseSage(nn.Module):
    """Batched graphs as adjacency matrices; neighbors are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(5, 10), nn.Linear(5, 10, bias=False)
        self.head = nn.Linear(10, 3)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        adjacency = adjacency.to(nodes.dtype)
        mean = adjacency @ nodes / adjacency.sum(-1, keepdim=True).clamp(min=1.0)
        x = F.normalize(torch.relu(self.own(nodes) + self.near(mean)), dim=-1)
        return self.head(x.mean(dim=1))


@register("pointnet", normal(3, 12), batch_norm=True, dropout=True, fast=True)
class PointNet(nn.Module):
    """A learned 3x3 transform, shared point-wise layers, max over the points."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        self.points = nn.Sequential(
            nn.Conv1d(3, 12, 1), nn.BatchNorm1d(12), nn.ReLU(), nn.Conv1d(12, 16, 1)
        )
        self.head = nn.Sequential(
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 5)
        )

    def forward(self, cloud: Tensor) -> tuple[Tensor, Tensor]:
        matrix = self.matrix(self.align(cloud).max(dim=2).values).view(-1, 3, 3)
        matrix = matrix + torch.eye(3, dtype=cloud.dtype)
        x = self.points(torch.bmm(matrix, cloud))
        return F.log_softmax(self.head(torch.max(x, 2)[0]), dim=-1), matrix


@register("edge_conv", normal(10, 3))
class EdgeConv(nn.Module):
    """Dynamic graph CNN: the three nearest points by distance, edge MLP, max over neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, cloud: Tensor) -> Tensor:
        squares = (cloud * cloud).sum(-1)
        distance = squares[:, :, None] + squares[:, None, :] - 2 * cloud @ cloud.transpose(1, 2)
        near = torch.topk(-distance, 4, dim=-1).indices[..., 1:]
        index = near.flatten(1).unsqueeze(-1).expand(-1, -1, 3)
        neighbours = torch.gather(cloud, 1, index).unflatten(1, (10, 3))
        own = cloud.unsqueeze(2).expand_as(neighbours)
        x = self.edge(torch.cat([own, neighbours - own], dim=-1)).amax(dim=2)
        return self.head(x.mean(dim=1))


@register("spatial_transformer", normal(1, 12, 12))
class SpatialTransformer(nn.Module):
    """A small net predicts an affine map, the image is resampled by it, then classified."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(1, 4, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.Tanh()
        )
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        self.classify = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 4)
        )

    def forward(self, image: Tensor) -> Tensor:
        theta = (self.identity + 0.4 * self.locate(image)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return self.classify(F.grid_sample(image, grid, align_corners=False))
