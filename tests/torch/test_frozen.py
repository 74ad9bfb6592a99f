"""Parameters that a module does not train: they do not train here either, unless they are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.torch import from_torch
from onnxtrain.torch.export import rename_initializers

HEAD = ["3.bias", "3.weight"]


def net(*frozen: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    for i in frozen:
        made[i].requires_grad_(False)
    return made


def trained(model: Any, **options: Any) -> list[str]:
    """Return the names of what artifacts train."""
    options = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.1", **options}
    return sorted(p.name for p in onnxtrain.build(model, **options).manifest.parameters)


def test_what_is_frozen_stays_and_the_rest_follows_torch() -> None:
    module = net(0, 1)
    artifacts = onnxtrain.build(
        from_torch(module, torch.randn(5, 4)), loss="cross_entropy", optimizer="sgd:lr=0.1"
    )
    assert any("frozen, as the maker" in r for r in artifacts.manifest.options["repairs"])
    trainer = onnxtrain.Trainer(artifacts)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module.train()
    for seed in range(3):
        torch.manual_seed(seed)
        x, labels = torch.randn(6, 4), torch.randint(0, 3, (6,))
        loss = nn.functional.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), labels.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    state = trainer.state_dict()
    assert sorted(state) == ["1.running_mean", "1.running_var", *HEAD]
    for name, value in state.items():
        np.testing.assert_allclose(value, module.state_dict()[name], rtol=1e-5, atol=1e-6)
    module.eval()
    (y,) = trainer.predict(np.ones((2, 4), np.float32)).values()
    np.testing.assert_allclose(y, module(torch.ones(2, 4)).detach(), rtol=1e-4, atol=1e-5)


def test_names_train_them_all_the_same() -> None:
    model = from_torch(net(0, 1), torch.randn(5, 4))
    assert trained(model) == HEAD
    assert trained(model, train="*") == HEAD
    assert trained(model, train=["0.weight", "3.*"]) == ["0.weight", *HEAD]
    assert sorted(onnxtrain.parameters(model)) == HEAD


def test_a_file_of_it_knows(tmp_path: Path) -> None:
    model = from_torch(net(0), torch.randn(5, 4))
    model.save(tmp_path / "model.onnx")
    assert trained(tmp_path / "model.onnx") == ["1.bias", "1.weight", *HEAD]
    rename_initializers(model, lambda name: f"net.{name}")
    assert trained(model) == [f"net.{n}" for n in ["1.bias", "1.weight", *HEAD]]


def test_nothing_is_left() -> None:
    model = from_torch(net(0, 1, 3), torch.randn(5, 4))
    with pytest.raises(PrepareError, match="frozen, as the maker of the file says: 6"):
        trained(model)
    adapted = onnxtrain.lora(model, rank=2, targets="all-linear")
    assert trained(adapted) == ["0.lora_A", "0.lora_B"]
