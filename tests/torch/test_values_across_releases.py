"""Training steps equal torch's where releases of dependencies have differed, or are likely to.

``make lower-bounds`` runs this file on the oldest and on the newest releases that pyproject.toml
allows. It needs torch, onnxscript and pytest only.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim
from onnxtrain.losses import LossTerm
from onnxtrain.torch import from_torch


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.reshape(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.project(x).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.norm(x + y.transpose(1, 2).reshape(x.shape))
        return self.head(y.mean(1))


def norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3)),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 3))


NETS = {
    "batch_norm": (norms, (8, 2, 8, 8)),
    "lstm": (Recurrent, (8, 6, 5)),
    "attention": (Attention, (8, 6, 8)),
    "multi_head_attention": (transformer, (8, 6, 8)),
}


@pytest.mark.parametrize("name", NETS)
def test_steps_equal_torch(name: str) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    module = make().train()
    x, labels = torch.randn(4, *shape), torch.randint(0, 3, (4, shape[0]))
    model = from_torch(copy.deepcopy(module), x[0])
    loss = [LossTerm("cross_entropy", output=model.graph.outputs[0].name)]
    trainer = onnxtrain.Trainer(onnxtrain.build(model, loss=loss, optimizer=optim.SGD(lr=0.1)))
    reference = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(4):
        expected = nn.functional.cross_entropy(module(x[i]), labels[i])
        reference.zero_grad()
        expected.backward()
        reference.step()
        got = trainer.step(x[i].numpy(), labels[i].numpy()).loss
        assert got == pytest.approx(expected.item(), rel=2e-5)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for n in (*trainer.parameters, *trainer.buffers):
        np.testing.assert_allclose(
            trainer.view(n), tensors[n].detach().numpy(), rtol=2e-3, atol=2e-5, err_msg=n
        )


@pytest.mark.parametrize("opset", [13, 15, 21])
def test_a_file_in_training_mode_whose_statistics_nothing_reads(opset: int) -> None:
    """One output, or more that are unused: the statistics of the batch normalize all the same."""
    rng = np.random.default_rng(0)
    arrays = {
        **{"scale": rng.uniform(0.5, 2, 3), "bias": rng.standard_normal(3)},
        **{"mean": rng.standard_normal(3), "var": rng.uniform(0.5, 2, 3)},
    }
    outputs = ["y", "new_mean", "new_var", *(("saved_mean", "saved_var") if opset < 14 else ())]
    node = onnx.NodeProto(op_type="BatchNormalization", input=["x", *arrays], output=outputs)
    if opset >= 14:
        node.attribute.add(name="training_mode", i=1, type=onnx.AttributeProto.INT)
    graph = onnx.GraphProto(name="net", node=[node])
    graph.initializer.extend(
        ir.to_proto(ir.Tensor(a.astype(np.float32), name=n)) for n, a in arrays.items()
    )
    for name, values in (("x", graph.input), ("y", graph.output)):
        info = values.add(name=name)
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for size in ("batch", 3):
            dim = info.type.tensor_type.shape.dim.add()
            setattr(dim, "dim_param" if isinstance(size, str) else "dim_value", size)
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.add(domain="", version=opset)
    x, y = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
    trainer = onnxtrain.Trainer(
        onnxtrain.build(model, loss="mse", optimizer=optim.SGD(lr=0.1), mode="as-is")
    )
    result = trainer.step(x, y)
    scale, bias = (
        torch.tensor(arrays[n], dtype=torch.float32, requires_grad=True) for n in ("scale", "bias")
    )
    out = nn.functional.batch_norm(torch.from_numpy(x), None, None, scale, bias, training=True)
    loss = nn.functional.mse_loss(out, torch.from_numpy(y))
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in (("scale", scale), ("bias", bias)):
        assert weight.grad is not None
        expected = (weight - 0.1 * weight.grad).detach().numpy()
        np.testing.assert_allclose(trainer.parameters[name], expected, rtol=1e-5, err_msg=name)


def test_dropout_scales_what_it_keeps() -> None:
    """The gradient of a sum of weighted inputs is the mask: 0 or ``1 / (1 - p)``."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4000))
            self.dropout = nn.Dropout(0.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(x * self.weight).sum(1)

    net, x = Net().train(), torch.ones(1, 4000)
    model = from_torch(net, x)
    name = model.graph.outputs[0].name
    artifacts = onnxtrain.build(
        model, loss=lambda op, y: op.ReduceSum(y, keepdims=0), optimizer="sgd"
    )
    trainer = onnxtrain.Trainer(artifacts)
    gradients = [trainer.gradients(x.numpy())["weight"]]
    gradients.append(trainer.gradients(x.numpy())["weight"])
    np.testing.assert_array_equal(*gradients)  # the same step, the same mask
    assert set(np.round(np.unique(gradients[0]), 5)) == {0.0, np.float32(1.33333)}
    assert 0.22 < np.mean(gradients[0] == 0) < 0.28
    before = trainer.parameters["weight"].copy()
    loss = trainer.step(x.numpy()).loss
    assert loss == pytest.approx(float(np.sum(before * gradients[0])), rel=1e-5)
    expected = net.eval()(x).item()
    assert trainer.predict(x.numpy())[name].item() != expected  # trained since
    trainer.parameters["weight"] = before
    assert trainer.predict(x.numpy())[name].item() == pytest.approx(expected, rel=1e-6)
