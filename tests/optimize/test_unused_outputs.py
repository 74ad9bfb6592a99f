"""Unused outputs stay in memory until a run ends: models for a GPU have none."""

from __future__ import annotations

import torch
from torch import nn

import onnxtrain
from onnxtrain.torch import from_torch


def test_statistics_have_no_unused_outputs() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Flatten())
    model = from_torch(nn.Sequential(net, nn.Linear(2 * 256, 3)), (torch.randn(2, 1, 16, 16),))
    artifacts = onnxtrain.build(
        model, loss="cross_entropy", optimizer="adamw", target="cuda", dims={"batch": 2}
    )
    for built in artifacts.models.values():
        graph = built.graph
        read = {x for n in graph.node for x in n.input} | {y.name for y in graph.output}
        statistics = [n for n in graph.node if n.op_type == "LayerNormalization"]
        assert all(y in read for n in statistics for y in n.output if y)
    kinds = [n.op_type for m in artifacts.models.values() for n in m.graph.node]
    assert "LayerNormalization" in kinds
