"""Losses over rows that belong together, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from onnxtrain.errors import PrepareError
from tests.losses.compare import compare

rng = np.random.default_rng(11)


def in_turn(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [x[i::parts] for i in range(parts)]


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm", "webgpu", "portable"])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_multiple_negatives(target: str, parts: int, reduction: str) -> None:
    def oracle(x: torch.Tensor) -> torch.Tensor:
        anchors, *others = in_turn(F.normalize(x, dim=1), parts)
        scores = 7.0 * anchors @ torch.cat(others).T
        return F.cross_entropy(scores, torch.arange(len(anchors)), reduction=reduction)

    loss = L.MultipleNegatives(scale=7.0, parts=parts, reduction=reduction)
    x = rng.standard_normal((4 * parts, 5)).astype(np.float32)
    compare(loss, oracle, [x], [], target=target)
    compare(loss, oracle, [x], [], target=target, dynamic=False)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_triplet_rows(swap: bool, reduction: str) -> None:
    def oracle(x: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(*in_turn(x, 3), swap=swap, reduction=reduction)

    x = rng.standard_normal((12, 5)).astype(np.float32)
    compare(L.TripletRows(swap=swap, reduction=reduction), oracle, [x], [])


def test_names_and_refusals() -> None:
    assert L.resolve("multiple_negatives:parts=3")[0].loss == L.MultipleNegatives(parts=3)
    assert L.resolve("triplet_rows")[0].loss == L.TripletRows()
    with pytest.raises(PrepareError, match="parts must be 2 or 3"):
        L.MultipleNegatives(parts=4)
