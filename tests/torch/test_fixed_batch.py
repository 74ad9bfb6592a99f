"""Files that torch exports with a fixed batch of 1: the batch axis is freed, or refused by name."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import onnxtrain
from onnxtrain import losses, optim
from onnxtrain.cli.main import app
from onnxtrain.errors import PrepareError, ShapeError, hints_name_flags
from onnxtrain.training import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.block(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0].mean(1))


class TimeFirst(nn.Module):
    """Attention with the batch on axis 1, merged with the heads and with the time inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Decoder(nn.Module):
    """Shuffled channels and an enlarged image beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(5, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(x)
        b, c, h, w = y.shape
        y = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        y = nn.functional.interpolate(y, scale_factor=2, mode="bilinear")
        return self.up(torch.cat([x, y], 1))


NETS = {
    "vision_transformer": (VisionTransformer, torch.zeros(1, 1, 8, 8), 0),
    "lstm": (Recurrent, torch.zeros(1, 7, dtype=torch.int64), 0),
    "time_first": (TimeFirst, torch.zeros(6, 1, 8), 1),
    "decoder": (Decoder, torch.zeros(1, 1, 8, 8), 0),
}


def exported(module: nn.Module, *inputs: torch.Tensor, dynamo: bool = True) -> bytes:
    file = io.BytesIO()
    opset = {} if dynamo else {"opset_version": 17}
    torch.onnx.export(module.eval(), inputs, file, dynamo=dynamo, input_names=["x"], **opset)
    return file.getvalue()


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_a_freed_batch_trains_as_torch(name: str, dynamo: bool) -> None:
    make, example, axis = NETS[name]
    torch.manual_seed(0)
    module = make()
    for p in module.parameters():  # exporters merge equal norms and biases
        p.data += 0.1 * torch.randn(p.shape)
    data = exported(module, example, dynamo=dynamo)
    dims: dict[str, int | str] = {"x[1]": "batch"} if axis else {}
    artifacts = onnxtrain.build(data, loss="mse", optimizer=optim.SGD(lr=0.1), dims=dims)
    assert "was fixed, it is 'batch' now" in str(artifacts.manifest.options["repairs"])
    shape = [5 if i == axis else d for i, d in enumerate(example.shape)]
    x = torch.randint(0, 20, shape) if name == "lstm" else torch.randn(shape)
    y = torch.randn(module(x).shape)
    expected = nn.functional.mse_loss(module(x), y)
    expected.backward()
    trainer = Trainer(artifacts)
    gradients = trainer.gradients(x.numpy(), y.numpy())
    weights = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    found = [n for n in gradients if n in weights and gradients[n].shape == weights[n].shape]
    assert found
    for n in found:
        np.testing.assert_allclose(gradients[n], weights[n].numpy(), rtol=1e-3, atol=2e-5)
    assert trainer.step(x.numpy(), y.numpy()).loss == pytest.approx(expected.item(), rel=1e-5)


def test_sizes_of_the_freed_axis_can_be_fixed(tmp_path: Path) -> None:
    data = exported(linear(), torch.zeros(1, 2, 4), dynamo=False)
    options = {"loss": "mse", "optimizer": "sgd"}
    for dims, fixed in (
        ({}, None),
        ({"x[0]": "rows"}, None),
        ({"x[0]": 1}, 1),
        ({"batch": 32}, 32),
        ({"x[0]": 32}, 32),
    ):
        trainer = Trainer(onnxtrain.build(data, **options, dims=dims))
        assert trainer.fixed_batch == fixed, dims
    trainer = Trainer(onnxtrain.build(data, **options))
    history = trainer.fit(
        {"x": np.ones((64, 2, 4), np.float32), "target": np.zeros((64, 3), np.float32)},
        batch_size=32,
        progress=False,
    )
    assert len(history.losses) == 2
    trainer.export(tmp_path / "trained.onnx")
    graph = onnx.load(tmp_path / "trained.onnx").graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_the_error_for_a_fixed_batch_names_the_way_out_and_it_works(tmp_path: Path) -> None:
    data = exported(linear(), torch.zeros(1, 2, 4), dynamo=False)
    trainer = Trainer(onnxtrain.build(data, loss="mse", optimizer="sgd", dims={"x[0]": 1}))
    batch = np.ones((32, 2, 4), np.float32), np.ones((32, 3), np.float32)
    with pytest.raises(ShapeError, match=r"build\(..., dims=\{'x\[0\]': 'batch'\}\) frees"):
        trainer.step(*batch)
    with hints_name_flags(), pytest.raises(ShapeError, match=r"--dim x\[0\]=batch frees"):
        trainer.step(*batch)
    (tmp_path / "net.onnx").write_bytes(data)
    command = ["build", str(tmp_path / "net.onnx"), "-o", str(tmp_path / "art"), "--loss", "mse"]
    result = CliRunner().invoke(app, [*command, "--optimizer", "sgd", "--dim", "x[0]=batch"])
    assert result.exit_code == 0, result.output
    assert "changed: the size of x[0] was fixed, it is 'batch' now" in result.output
    assert Trainer(tmp_path / "art").step(*batch).updated


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.mean(0, keepdim=True)


def test_examples_that_depend_on_each_other_are_not_a_batch() -> None:
    data = exported(Centered(), torch.zeros(1, 4), dynamo=False)
    loss = [losses.LossTerm("mse")]
    artifacts = onnxtrain.build(data, loss=loss, optimizer="sgd")
    assert Trainer(artifacts).fixed_batch == 1
    assert "'batch' now" not in str(artifacts.manifest.options["repairs"])
    with pytest.raises(PrepareError, match=r"x\[0\] cannot be freed: the examples of a batch dep"):
        onnxtrain.build(data, loss=loss, optimizer="sgd", dims={"x[0]": "batch"})
    with pytest.raises(
        PrepareError, match=r"not name a fixed axis\nhint: the fixed sizes are x\[0"
    ):
        onnxtrain.build(data, loss=loss, optimizer="sgd", dims={"y[0]": "batch"})
