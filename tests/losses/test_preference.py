"""Preference losses against their formulas in torch, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from onnxtrain.errors import PrepareError, ShapeError
from tests.losses.compare import compare

TARGETS = ["cpu", "cuda", "wasm", "webgpu", "portable"]
rng = np.random.default_rng(12)


def logits(rows: int = 6) -> np.ndarray:
    return rng.standard_normal((rows, 5, 7)).astype(np.float32)


def labels(rows: int = 6) -> np.ndarray:
    values = rng.integers(0, 7, (rows, 5))
    values[:, :2] = -100  # the prompt
    values[1, 4] = -100  # padding
    return values


def log_probabilities(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums over the tokens of each row, and the number of tokens."""
    x, y = x[:, :-1].log_softmax(-1), y[:, 1:]
    counted = y != -100
    each = x.gather(2, y.clamp(min=0)[..., None])[..., 0]
    return (each * counted).sum(1), counted.sum(1)


def dpo(beta: float, smoothing: float) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = log_probabilities(x, y)[0] - log_probabilities(reference.detach(), y)[0]
        m = value[0::2] - value[1::2]
        return (
            -F.logsigmoid(beta * m) * (1 - smoothing) - F.logsigmoid(-beta * m) * smoothing
        ).mean()

    return oracle


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(target: str, smoothing: float) -> None:
    loss = L.DPO(beta=0.3, label_smoothing=smoothing)
    compare(loss, dpo(0.3, smoothing), [logits(), logits()], [labels()], target=target)


def test_dpo_of_stored_log_probabilities() -> None:
    def oracle(x: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = log_probabilities(x, y)[0] - reference
        return -F.logsigmoid(0.1 * (value[0::2] - value[1::2])).mean()

    stored = -10 * rng.random(6).astype(np.float32)
    compare(L.DPO(), oracle, [logits()], [stored, labels()])
    compare(L.DPO(), oracle, [logits()], [stored, labels()], dynamic=False)


@pytest.mark.parametrize("target", TARGETS)
def test_ipo(target: str) -> None:
    def oracle(x: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (ours, count), (theirs, _) = log_probabilities(x, y), log_probabilities(reference, y)
        value = (ours - theirs.detach()) / count
        return ((value[0::2] - value[1::2] - 1 / (2 * 0.4)) ** 2).mean()

    compare(L.IPO(beta=0.4), oracle, [logits(), logits()], [labels()], target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_orpo(target: str) -> None:
    def oracle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = log_probabilities(x, y)
        mean = total / count
        odds = mean - torch.log1p(-mean.exp())
        ratio = -F.logsigmoid(odds[0::2] - odds[1::2]).mean()
        cross_entropy = F.cross_entropy(x[0::2, :-1].flatten(0, 1), y[0::2, 1:].flatten())
        return cross_entropy + 0.2 * ratio

    compare(L.ORPO(beta=0.2), oracle, [logits()], [labels()], target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sign", [1, -1])
def test_kto(target: str, sign: int) -> None:
    x, reference, y = logits(), logits(), labels()
    # Once the mean over foreign answers is positive, once it is negative and counts as 0.
    for row in (1, 3, 5):
        for position in range(1, 4):
            if y[row, position + 1] >= 0:
                x[row, position, y[row, position + 1]] += 3 * sign
    desirable = np.array([1, 0, 0, 0, 1, 1])

    def oracle(
        x: torch.Tensor, reference: torch.Tensor, y: torch.Tensor, desirable: torch.Tensor
    ) -> torch.Tensor:
        value = log_probabilities(x, y)[0] - log_probabilities(reference, y)[0].detach()
        z = value[1::2].mean().clamp(min=0).detach()
        assert (z > 0) == (sign > 0)
        chosen = 2.0 * (1 - torch.sigmoid(0.1 * (value[0::2] - z)))
        rejected = 0.5 * (1 - torch.sigmoid(0.1 * (z - value[0::2])))
        return torch.where(desirable[0::2] == 1, chosen, rejected).mean()

    loss = L.KTO(desirable_weight=2.0, undesirable_weight=0.5)
    compare(loss, oracle, [x, reference], [y, desirable], target=target)


def test_refusals() -> None:
    with pytest.raises(PrepareError, match="beta must be positive"):
        L.DPO(beta=0)
    with pytest.raises(PrepareError, match="label_smoothing"):
        L.DPO(label_smoothing=0.5)
    with pytest.raises(ShapeError, match="chosen and rejected"):
        compare(L.ORPO(), lambda x, y: x.sum(), [logits()[0]], [labels()])
