"""Models exported exactly as the old documentation says."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch

from onnxtrain.compat.ort import artifacts
from onnxtrain.compat.ort.api import CheckpointState, Module, Optimizer


class Net(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(x.flatten(1)))


class LanguageModel(torch.nn.Module):
    """A transformer whose output layer shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def export(net: torch.nn.Module, path, opset: int, *inputs: torch.Tensor) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            inputs or (torch.randn(2, 1, 8, 8),),
            path,
            dynamo=False,
            input_names=["input"],
            output_names=["output"],
            opset_version=opset,
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
            export_params=True,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
        )
    return onnx.load(path)


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((8, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 8)


@pytest.mark.parametrize("opset", [14, 17])
def test_training_follows_torch(tmp_path, opset):
    torch.manual_seed(0)
    net = Net(dropout=0.0)
    model = export(net, tmp_path / "model.onnx", opset)
    artifacts.generate_artifacts(
        model,
        requires_grad=[n for n, _ in net.named_parameters()],
        artifact_directory=tmp_path,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    reference = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    for step in range(10):
        x, labels = batch(step)
        loss = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(labels))
        np.testing.assert_allclose(module(x, labels), loss.item(), rtol=1e-4)
        reference.zero_grad()
        loss.backward()
        reference.step()
        optimizer.step()
        module.lazy_reset_grad()
    net.eval()
    module.eval()
    expected = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(labels))
    np.testing.assert_allclose(module(x, labels), expected.item(), rtol=1e-4)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(
            state.parameters[name].data, parameter.detach(), rtol=1e-3, atol=1e-5
        )


def test_dropout_is_on_in_training_and_off_in_evaluation(tmp_path):
    torch.manual_seed(0)
    net = Net(dropout=0.5)
    model = export(net, tmp_path / "model.onnx", 14)
    artifacts.generate_artifacts(
        model,
        requires_grad=["head.weight", "head.bias"],
        artifact_directory=tmp_path,
        frozen_params=["conv.weight", "conv.bias", "norm.weight", "norm.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x, labels = batch(0)
    assert len({module(x, labels).item() for _ in range(4)}) == 4
    module.eval()
    assert len({module(x, labels).item() for _ in range(4)}) == 1
    module.export_model_for_inferencing(tmp_path / "inference.onnx", ["output"])
    onnx.checker.check_model(onnx.load(tmp_path / "inference.onnx"), full_check=True)


def test_a_language_model_with_logits_of_three_axes(tmp_path):
    torch.manual_seed(0)
    net = LanguageModel()
    ids = torch.randint(0, 11, (4, 6))
    model = export(net, tmp_path / "model.onnx", 14, ids)
    artifacts.generate_artifacts(
        model,
        requires_grad=[n for n, _ in net.named_parameters()],
        artifact_directory=tmp_path,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    labels = torch.randint(0, 11, (4, 6))
    loss = torch.nn.functional.cross_entropy(net(ids).transpose(1, 2), labels)
    np.testing.assert_allclose(module(ids.numpy(), labels.numpy()), loss.item(), rtol=1e-5)
    loss.backward()
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(
            state.parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-6
        )
