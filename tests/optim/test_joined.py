"""Updates of joined parameters give the numbers of separate ones, in few operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain import build, optim, thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.placement import nodes_off_gpu
from onnxtrain.training.trainer import Trainer

LAYERS = 11  # with their biases more tensors than one Split may give

OPTIMIZERS = {
    "adamw": optim.AdamW(lr=0.02),
    "groups": optim.AdamW(
        lr=0.02,
        weight_decay=0.1,
        groups=[optim.ParamGroup("*.bias", weight_decay=0.0, lr_factor=0.5)],
    ),
    "adam": optim.Adam(lr=0.02, betas=(0.8, 0.99)),
    "adam with decay": optim.Adam(lr=0.02, weight_decay=0.1),
    "amsgrad": optim.AdamW(lr=0.02, amsgrad=True),
    "hf": optim.AdamW(lr=0.02, form="hf"),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd": optim.SGD(lr=0.1),
    "lion": optim.Lion(lr=0.01),
    "rmsprop": optim.RMSprop(lr=0.01),
    "lamb": optim.LAMB(lr=0.02),
    "adafactor": optim.Adafactor(lr=0.02),
}


def net(layers: int = LAYERS, width: int = 6) -> onnx.ModelProto:
    """Return a deep net of small layers."""
    rng = np.random.default_rng(4)
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="net"))
    x = op.input("x", ir.DataType.FLOAT, ["batch", width])

    def weight(name: str, *shape: int) -> ir.Value:
        array = (rng.standard_normal(shape) / np.sqrt(width)).astype(np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(shape),
            const_value=ir.Tensor(array, name=name),
        )
        op.graph.register_initializer(value)
        return value

    for i in range(layers):
        w, b = weight(f"fc{i}.weight", width, width), weight(f"fc{i}.bias", width)
        x = op.Gemm(x if i == 0 else op.Tanh(x), w, b, transB=1)
    x.name = "logits"
    op.graph.outputs.append(x)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def trained(target: str, optimizer: optim.Optimizer, folder: str) -> tuple[list[float], Trainer]:
    """Return losses of a few steps, one label of which does not count, and the trainer."""
    build(net(), loss="cross_entropy", optimizer=optimizer, target=target).save(folder)
    trainer = Trainer(folder, threads=1)
    rng = np.random.default_rng(5)
    losses = []
    for i in range(8):
        labels = rng.integers(0, 6, 5)
        labels[i % 5] = -100
        losses.append(trainer.step(rng.standard_normal((5, 6)).astype(np.float32), labels).loss)
    return losses, trainer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("largest", [1 << 22, 100])
def test_joined_updates_are_those_of_separate_parameters(name, largest, tmp_path, monkeypatch):
    monkeypatch.setattr(thresholds, "FLATTENED_VECTOR_ELEMENTS", largest)
    expected, plain = trained("portable", OPTIMIZERS[name], f"{tmp_path}/plain")
    losses, joined = trained("webgpu", OPTIMIZERS[name], f"{tmp_path}/joined")
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    kept = plain.artifacts.manifest
    # The losses differ in their last bits, which steps by the root of the square make larger.
    part_of_a_step = 5e-4 * OPTIMIZERS[name].lr
    for tensor in (*kept.parameters, *kept.state):
        old, new = plain.view(tensor.name), joined.view(tensor.name)
        near = 2e-6 * np.abs(old).max()
        if tensor in kept.parameters:
            near = max(near, part_of_a_step)
        np.testing.assert_allclose(new, old, rtol=5e-5, atol=near)


def test_large_parameters_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(thresholds, "FLATTENED_PARAMETER_ELEMENTS", 6)
    expected, _ = trained("portable", OPTIMIZERS["adamw"], f"{tmp_path}/plain")
    losses, _ = trained("webgpu", OPTIMIZERS["adamw"], f"{tmp_path}/joined")
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


@pytest.mark.parametrize("layers", [3, 4, 11])
def test_no_kernel_has_more_than_eight_buffers_and_nothing_leaves_the_gpu(layers, tmp_path):
    options = {"optimizer": "adamw", "target": "webgpu", "dims": {"batch": 5}}
    build(net(layers), loss="cross_entropy", **options).save(tmp_path)
    model = onnx.load(tmp_path / "step_model.onnx")
    splits = [n for n in model.graph.node if n.op_type == "Split"]
    assert max(len(n.output) for n in splits) <= 7
    assert nodes_off_gpu(model, "webgpu") == []


def test_a_step_of_two_layers_starts_few_kernels(tmp_path):
    build(net(2), loss="cross_entropy", optimizer="adamw", target="webgpu").save(tmp_path)
    model = onnx.load(tmp_path / "step_model.onnx")
    free = {"Reshape", "Squeeze", "Unsqueeze"}
    assert len([n for n in model.graph.node if n.op_type not in free]) <= 50
