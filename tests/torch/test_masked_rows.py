"""Fully masked attention rows, as in left-padded batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnxtrain
from onnxtrain.torch import from_torch, last_report

F = nn.functional
ROWS, LENGTH = 3, 5


class Attends(nn.Module):
    """Two layers of causal attention over what ``mask`` keeps of each row."""

    def __init__(self, lowest: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.lowest = lowest

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [rows, length, 8]."""
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
            if self.lowest:  # as transformers' eager attention has it
                closed = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
                y = torch.softmax(q @ k.transpose(-1, -2) * 0.5 + closed, -1) @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    mask[2, -2:] = 0
    return torch.randn(ROWS, LENGTH, 8), mask, torch.randn(ROWS, LENGTH, 8)


@pytest.mark.parametrize("target", ["cpu", "cuda", "webgpu"])
@pytest.mark.parametrize("lowest", [False, True], ids=["booleans", "lowest numbers"])
@pytest.mark.parametrize("free", [True, False], ids=["any batch", "fixed"])
def test_training_follows_torch(target: str, lowest: bool, free: bool) -> None:
    module = Attends(lowest)
    model = from_torch(module, batch()[:2], dynamic_batch=free)
    assert any("fully masked" in r for r in last_report(model).repairs) == (not lowest)
    made = onnxtrain.build(model, loss="mse", optimizer="sgd:lr=0.5", target=target)
    if target != "cpu":
        assert all(n.op_type != "IsNaN" for n in made.models["train"].graph.node)
    trainer = onnxtrain.Trainer(made, device="cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for seed in range(3):
        x, mask, goal = batch(seed)
        with sdpa_kernel(SDPBackend.MATH):
            loss = F.mse_loss(module(x, mask), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = trainer.step(x.numpy(), mask.numpy(), goal.numpy()).loss
        assert found == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_the_trained_model_has_the_same_rows() -> None:
    module = Attends().eval()
    made = onnxtrain.build(from_torch(module, batch()[:2]), loss="mse", optimizer="sgd")
    x, mask, _ = batch(4)
    (y,) = onnxtrain.Trainer(made).predict(x.numpy(), mask.numpy()).values()
    np.testing.assert_allclose(y, module(x, mask).detach(), rtol=1e-4, atol=1e-5)
