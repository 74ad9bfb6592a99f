"""Losses of models that compute in other types than float32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import attach_loss
from tests.losses.small import FLOAT, W1, X, model_of, run, weight
from tests.losses.test_attach import LABELS, TA, signature
from tests.losses.test_losses import focal, sigmoid_focal, weighted_rmse


def test_half_precision_is_compared_in_float32() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", ir.DataType.FLOAT16, ["batch", 4])
        return {"y": op.MatMul(x, weight(op, "w", W1.astype(np.float16)))}

    attached = attach_loss(load_normalized(model_of(build)).model, "mse", metrics=["mae"])
    assert attached.loss.dtype == FLOAT
    assert signature(attached) == [("target", FLOAT, ("batch", "3"))]
    outputs = run(attached, x=X.astype(np.float16), target=TA + 300)
    np.testing.assert_allclose(outputs["loss"], np.mean((X @ W1 - TA - 300) ** 2), rtol=1e-2)


DOUBLE = {
    "cross_entropy": lambda y, labels, t: F.cross_entropy(y, labels),
    "focal:gamma=1": lambda y, labels, t: focal(y, labels, gamma=1.0),
    "nll": lambda y, labels, t: F.nll_loss(y, labels),
    "multi_margin": lambda y, labels, t: F.multi_margin_loss(y, labels),
    "bce_with_logits": lambda y, labels, t: F.binary_cross_entropy_with_logits(y, t),
    "sigmoid_focal:gamma=3": lambda y, labels, t: sigmoid_focal(y, t, gamma=3.0),
    "soft_margin": lambda y, labels, t: F.soft_margin_loss(y, t),
    "multilabel_soft_margin": lambda y, labels, t: F.multilabel_soft_margin_loss(y, t),
    "mse": lambda y, labels, t: F.mse_loss(y, t),
    "poisson_nll": lambda y, labels, t: F.poisson_nll_loss(y, t),
    "weighted_rmse:latitudes=[60, 0, -60, 10, 20, 30]": lambda y, labels, t: weighted_rmse(
        y, t, latitudes=(60, 0, -60, 10, 20, 30)
    ),
}


@pytest.mark.parametrize("loss", DOUBLE)
def test_double_precision(loss: str) -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", ir.DataType.DOUBLE, ["batch", 4])
        return {"y": op.MatMul(x, weight(op, "w", W1.astype(np.float64)))}

    attached = attach_loss(load_normalized(model_of(build)).model, loss)
    assert attached.loss.dtype == ir.DataType.DOUBLE
    y, t = torch.tensor(X.astype(np.float64) @ W1), torch.tensor(TA.astype(np.float64))
    expected = DOUBLE[loss](y, torch.tensor(LABELS), t)
    name = attached.targets[0].name
    given = LABELS if name == "labels" else t.numpy()
    actual = run(attached, x=X.astype(np.float64), **{name: given})["loss"]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
