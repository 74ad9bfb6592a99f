"""Tensors that an exporter merged are reported; an eps that is 0 in float16 is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.errors import PrepareError, hints_name_flags
from onnxtrain.losses import LossTerm
from onnxtrain.training import Trainer

from .models import classifier, finished, graph, weight


def normed(*, merged: bool) -> onnx.ModelProto:
    op = graph()
    y = op.input("x", ir.DataType.FLOAT, ["batch", 4])
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    scale, bias = weight(op, "norm.0.weight", ones), weight(op, "norm.0.bias", zeros)
    for i in range(3):
        if i and not merged:
            scale, bias = weight(op, f"norm.{i}.weight", ones), weight(op, f"norm.{i}.bias", zeros)
        y = op.LayerNormalization(op.Tanh(y), scale, bias)
    return finished(op, y=y)


def test_tensors_of_several_layers_are_reported() -> None:
    repairs = build(normed(merged=True), loss="mse", optimizer="sgd").manifest.options["repairs"]
    assert len(repairs) == 2
    assert all("belongs to 3 layers and trains as one tensor" in line for line in repairs)
    assert (
        build(normed(merged=False), loss="mse", optimizer="sgd").manifest.options["repairs"] == []
    )


def test_an_epsilon_that_is_zero_in_half_precision_is_refused() -> None:
    model = classifier(dtype=np.float16)
    options = {"loss": LossTerm("cross_entropy", output="scores"), "precision": "file"}
    with pytest.raises(PrepareError, match=r"AdamW\(eps=1e-08\) is 0 in float16") as error:
        build(model, optimizer="adamw", **options)
    assert "hint: optimizer=AdamW(eps=1e-4); or precision='float32'" in str(error.value)
    with hints_name_flags(), pytest.raises(PrepareError, match="--optimizer adamw:eps=1e-4"):
        build(model, optimizer="adamw", **options)
    for optimizer, precision in ((optim.AdamW(eps=1e-4), "file"), ("adamw", "float32")):
        trainer = Trainer(build(model, optimizer=optimizer, **{**options, "precision": precision}))
        x, labels = np.zeros((4, 6), np.float16), np.array([0, 1, 2, 0])  # no gradient for fc1
        for _ in range(4):
            assert np.isfinite(trainer.step(x, labels).loss)
        assert all(np.isfinite(trainer.parameters[n]).all() for n in trainer.parameters)
