"""Modules come out of the exporter whole, in the right mode, and train as torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.torch import from_torch, last_report
from onnxtrain.torch.exporters import ExportError


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 6 * 6, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(image))).flatten(1)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class Counting(nn.Module):
    """Gives something else on every call, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


@pytest.fixture(scope="module")
def batch_norm() -> tuple[BatchNormNet, torch.Tensor]:
    torch.manual_seed(0)
    return BatchNormNet(), torch.randn(3, 1, 8, 8)


def test_batch_norm_is_put_into_training_mode(batch_norm) -> None:
    module, x = batch_norm
    before = {n: b.clone() for n, b in module.named_buffers()}
    module.eval()
    model = from_torch(module, x)
    report = last_report(model)
    assert report.exporter == "dynamo"
    assert report.repairs == ("BatchNormalization put into training mode: 1 node(s)",)
    assert set(report.names) == {n for n, _ in module.named_parameters()}
    assert not module.training
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])
    for name in ("norm.running_mean", "norm.running_var"):
        stored = model.graph.initializers[name].const_value.numpy()
        np.testing.assert_array_equal(stored, before[name].numpy())
    assert [x.name for x in model.graph.inputs] == ["image"]
    assert str(model.graph.inputs[0].shape[0]) == "batch"


def test_evaluation_mode(batch_norm) -> None:
    module, x = batch_norm
    model = from_torch(module, x, train=False, dynamic_batch=False, names=["pixels"])
    kinds = {n.op_type: n for n in model.graph}
    assert "Dropout" not in kinds
    mode = kinds["BatchNormalization"].attributes.get("training_mode")
    assert mode is None or mode.as_int() == 0
    assert list(model.graph.inputs[0].shape) == [3, 1, 8, 8]
    assert model.graph.inputs[0].name == "pixels"


def test_an_example_that_another_layer_computed() -> None:
    hidden = nn.Linear(3, 4)(torch.ones(2, 3))
    model = from_torch(nn.Linear(4, 2), hidden)
    assert last_report(model).exporter == "dynamo"


def test_attention_dropout_is_kept() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = from_torch(nn.TransformerEncoder(layer, 1), torch.randn(3, 5, 8))
    drops = [n for n in model.graph.all_nodes() if n.op_type == "Dropout"]
    assert len(drops) == 4
    assert all(len(n.inputs) == 3 for n in drops)
    assert "Dropout put into training mode: 1 node(s)" in last_report(model).repairs


def test_tied_parameters_share_an_initializer() -> None:
    model = from_torch(Tied(), torch.tensor([[1, 2], [3, 4]]))
    names = last_report(model).names
    assert set(names) == {"embed.weight", "out.weight"}
    assert len(set(names.values())) == 1
    assert list(onnxtrain.parameters(model)) == [names["embed.weight"]]


def test_export_error_names_the_reason_of_each_exporter() -> None:
    with pytest.raises(ExportError, match="cannot export Counting") as error:
        from_torch(Counting(), torch.randn(2, 3))
    assert "dynamo:" in str(error.value)
    assert "legacy:" in str(error.value)


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4)


def test_export_error_names_the_unsupported_operator() -> None:
    with pytest.raises(ExportError) as error:
        from_torch(Unknown(), torch.randn(2, 3), dynamic_batch=False)
    lines = str(error.value).splitlines()
    assert "histc" in next(line for line in lines if "dynamo:" in line)
    assert all("Next steps" not in line and "\x1b" not in line for line in lines)


def test_wrong_number_of_input_names() -> None:
    with pytest.raises(ExportError, match="got 2 names for 1 inputs"):
        from_torch(nn.Linear(2, 2), torch.ones(1, 2), names=["a", "b"])


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.table + torch.tensor([0.5, 1.5, 2.5])


def test_buffers_and_literals_are_not_parameters() -> None:
    model = from_torch(Buffered(), torch.ones(2, 3))
    assert list(onnxtrain.parameters(model)) == ["fc.weight", "fc.bias"]
