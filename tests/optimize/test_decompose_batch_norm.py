"""decompose_batch_norm: WebGPU has no kernel for training mode."""

import numpy as np
import pytest

from onnxtrain.artifacts.build import build
from onnxtrain.training.trainer import Trainer
from tests.artifacts.models import with_norm


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_decomposition_trains_alike(training: bool, shared: bool) -> None:
    rng = np.random.default_rng(3)
    trainers = {
        target: Trainer(
            build(with_norm(training, shared), loss="mse", optimizer="adam", target=target)
        )
        for target in ("cpu", "webgpu")
    }
    ops = {
        t: [n.op_type for n in x.artifacts.models["step"].graph.node] for t, x in trainers.items()
    }
    assert "BatchNormalization" in ops["cpu"]
    assert "BatchNormalization" not in ops["webgpu"]
    for _ in range(5):
        x = rng.standard_normal((6, 4, 5)).astype(np.float32)
        y = rng.standard_normal((6, 3)).astype(np.float32)
        losses = {t: trainer.step(x, y).loss for t, trainer in trainers.items()}
        assert losses["webgpu"] == pytest.approx(losses["cpu"], abs=1e-5)
    for name, value in trainers["cpu"].buffers.items():
        assert value == pytest.approx(trainers["webgpu"].buffers[name], abs=1e-5)
