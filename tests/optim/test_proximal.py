"""FedProx's term in the graph, against the same term in torch's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onnxtrain
from onnxtrain.checkpoint import state_key
from onnxtrain.errors import PrepareError
from onnxtrain.optim.transforms import ANCHOR
from onnxtrain.torch import from_torch

MU = 0.3


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((8, 4)).astype(np.float32) for _ in range(6)]
    return [(x, rng.integers(0, 3, 8)) for x in rows]


def torch_weights(module: torch.nn.Module, anchors: dict[str, torch.Tensor]) -> dict[str, Any]:
    descent = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    for x, y in batches():
        descent.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(y))
        distances = [(p - anchors[n]).square().sum() for n, p in module.named_parameters()]
        (loss + MU / 2 * sum(distances)).backward()
        descent.step()
    return {n: p.detach().numpy() for n, p in module.named_parameters()}


@pytest.mark.parametrize("layout", ["fused", "separate", "vector"])
def test_the_term_is_that_of_the_loss(layout: str) -> None:
    module = net()
    model = from_torch(module, (torch.zeros(8, 4),))
    optimizer = onnxtrain.optim.SGD(lr=0.2, momentum=0.5, proximal=MU)
    trainer = onnxtrain.Trainer(
        onnxtrain.build(model, loss="cross_entropy", optimizer=optimizer), layout=layout
    )
    start = trainer.state_dict()
    own = {n: start[state_key(n, ANCHOR)] for n, _ in module.named_parameters()}
    assert all(np.array_equal(own[n], p.detach()) for n, p in module.named_parameters())
    anchors = {n: p.detach() + 0.5 for n, p in module.named_parameters()}
    moved = {state_key(n, ANCHOR): a.numpy() for n, a in anchors.items()}
    trainer.load_state_dict({**start, **moved})
    for x, y in batches():
        trainer.step(x, y)
    for name, expected in torch_weights(module, anchors).items():
        np.testing.assert_allclose(trainer.parameters[name], expected, rtol=1e-5, atol=1e-6)
    after = trainer.state_dict()
    assert all(np.array_equal(after[key], value) for key, value in moved.items())


def test_the_manifest_tells_of_it_where_it_is() -> None:
    model = from_torch(net(), (torch.zeros(8, 4),))
    plain = onnxtrain.build(model, loss="cross_entropy", optimizer="sgd", check=False)
    drawn = onnxtrain.build(model, loss="cross_entropy", optimizer="sgd:proximal=0.5", check=False)
    assert "proximal" not in plain.manifest.optimizer
    assert drawn.manifest.optimizer["proximal"] == 0.5


def test_a_negative_term_is_refused() -> None:
    with pytest.raises(PrepareError, match="proximal"):
        onnxtrain.optim.SGD(proximal=-0.1)
