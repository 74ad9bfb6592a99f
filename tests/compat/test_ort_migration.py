"""Checkpoints that onnxruntime-training 1.19.2 has written, read through the old API."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.checkpoint.ort_checkpoint import read_odtc
from onnxtrain.compat.ort import artifacts
from onnxtrain.compat.ort import state as stores
from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer
from tests.compat.models import model_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRAINED, FRESH = FIXTURES / "ort_training.ckpt", FIXTURES / "ort_training_fresh.ckpt"


@pytest.fixture
def folder(tmp_path):
    """Artifacts of the network whose checkpoints those are."""

    def build(op, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        hidden = op.Relu(op.Gemm(x, fc1_weight, fc1_bias))
        return {"y": op.Gemm(hidden, fc2_weight, fc2_bias)}

    weights = {"fc1.weight": [3, 4], "fc1.bias": [4], "fc2.weight": [4, 2], "fc2.bias": [2]}
    artifacts.generate_artifacts(
        model_of({"x": ["n", 3]}, weights, build),
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight"],
        frozen_params=["fc2.bias"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    return tmp_path


def open_run(folder, checkpoint):
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(folder / "training_model.onnx", state)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_its_state_is_all_there(folder):
    state, _, optimizer = open_run(folder, TRAINED)
    expected = read_odtc(TRAINED)
    for name, array in {**expected.parameters, **expected.frozen}.items():
        np.testing.assert_array_equal(state.parameters[name].data, array)
    assert not state.parameters["fc2.bias"].requires_grad
    assert dict(state.properties) == {"epoch": 3, "best": 0.25, "name": "peer"}
    assert optimizer.get_learning_rate() == pytest.approx(1e-3)
    np.testing.assert_array_equal(
        state._state.state["fc1.bias.exp_avg_sq"], expected.moments["fc1.bias"]["momentum1"]
    )


def test_three_steps_here_are_three_steps_there(folder):
    state, module, optimizer = open_run(folder, FRESH)
    rng = np.random.default_rng(0)
    for shape in ((3, 4), (4,), (4, 2), (2,)):
        rng.standard_normal(shape)
    x, target = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (5, 2)))
    losses = []
    for _ in range(3):
        losses.append(module(x, target).item())
        optimizer.step()
        module.lazy_reset_grad()
    assert losses == pytest.approx([3.0230913, 3.006956, 2.990916], rel=1e-5)
    for name, array in read_odtc(TRAINED).parameters.items():
        np.testing.assert_allclose(state.parameters[name].data, array, rtol=1e-4, atol=1e-5)


def test_its_nominal_checkpoints_know_names_only(monkeypatch):
    checkpoint = dataclasses.replace(read_odtc(FRESH), nominal=True)
    monkeypatch.setattr(stores, "read_odtc", lambda path: checkpoint)
    state = CheckpointState.load_checkpoint(FRESH)
    assert "fc1.weight" in state.parameters
    with pytest.raises(RuntimeError, match="Please load the parameter states first"):
        state.parameters["fc1.weight"]
