"""Training runs that follow torch step by step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain import losses, optim
from onnxtrain.artifacts.build import build
from onnxtrain.training import Trainer

from .nets import NETS, Cnn, batches, exported, module

STEPS = 100
PAIRS: dict[str, tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        optim.SGD(lr=0.02, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    ),
    "adam": (optim.Adam(lr=2e-3), lambda p: torch.optim.Adam(p, lr=2e-3)),
    "adamw": (
        optim.AdamW(lr=2e-3, weight_decay=0.05),
        lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05),
    ),
}


def torch_loss(name: str, scores: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    moved = scores.movedim(-1, 1) if NETS[name].axis == -1 else scores
    return nn.functional.cross_entropy(moved, torch.from_numpy(labels))


@pytest.mark.parametrize("optimizer", PAIRS)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_losses_follow_torch(name: str, optimizer: str) -> None:
    ours, theirs = PAIRS[optimizer]
    artifacts = build(
        exported(name, training=True),
        loss=losses.CrossEntropy(axis=NETS[name].axis),
        optimizer=ours,
    )
    trainer, net = Trainer(artifacts, threads=1), module(name).train()
    descent = theirs(net.parameters())
    for x, labels in batches(name, STEPS):
        loss = torch_loss(name, net(torch.from_numpy(x)), labels)
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert trainer.step(x, labels).loss == pytest.approx(loss.item(), rel=1e-4)
    for key, p in net.named_parameters():
        if key.endswith("qkv.bias"):
            continue  # softmax takes the keys' bias away, and Adam blows its rounding errors up
        np.testing.assert_allclose(
            trainer.parameters[key], p.detach().numpy(), rtol=1e-3, atol=1e-3, err_msg=key
        )


@pytest.mark.parametrize("optimizer", PAIRS)
def test_batch_norm_and_dropout_follow_torch(optimizer: str) -> None:
    """Torch gets the masks that our step drew; running statistics are compared as well."""
    ours, theirs = PAIRS[optimizer]
    model = exported("cnn", training=True)
    (dropped,) = (n.output[0] for n in model.graph.node if n.op_type == "Dropout")
    artifacts = build(model, loss="cross_entropy", optimizer=ours, outputs=[dropped])
    trainer, net = Trainer(artifacts, seed=3, threads=1), module("cnn").train()
    assert isinstance(net, Cnn)
    descent = theirs(net.parameters())
    kept = []
    for x, labels in batches("cnn", STEPS):
        result = trainer.step(x, labels)
        mask = result.outputs[dropped] != 0
        features = net.features(torch.from_numpy(x))
        kept.append(mask[features.detach().numpy() > 0].mean())
        scores = net.head(features * torch.from_numpy(mask) / 0.75)
        loss = torch_loss("cnn", scores, labels)
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-4)
    assert np.mean(kept) == pytest.approx(0.75, abs=0.02)
    for key, buffer in net.named_buffers():
        if key.endswith("num_batches_tracked"):
            continue
        np.testing.assert_allclose(trainer.buffers[key], buffer.numpy(), rtol=1e-4, atol=1e-5)
    x, labels = batches("cnn", 1, seed=9)[0]
    net.eval()
    expected = net(torch.from_numpy(x))
    np.testing.assert_allclose(
        trainer.predict(x=x)["y"], expected.detach().numpy(), rtol=1e-3, atol=1e-4
    )
    evaluated = trainer.evaluate_batch(x, labels).loss
    assert evaluated == pytest.approx(torch_loss("cnn", expected, labels).item(), rel=1e-4)
