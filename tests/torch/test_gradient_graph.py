"""The old one-file interface: output, loss and gradients, then an optimizer as its own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from onnxtrain import optim
from onnxtrain.errors import LoweringError
from onnxtrain.torch import export_gradient_graph, export_optimizer_graph


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc2(self.relu(self.fc1(x))))


def binary_cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -torch.mean(labels * torch.log2(output) + (1 - labels) * torch.log2(1 - output))


def test_binary_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = MyModel(), tmp_path / "gradient_graph.onnx"
    x, labels = torch.randn(32, 10), torch.randint(0, 2, (32, 1)).float()
    export_gradient_graph(model, binary_cross_entropy, x, labels, path)
    session = onnxruntime.InferenceSession(str(path))
    names = [n for n, _ in model.named_parameters()]
    assert [i.name for i in session.get_inputs()] == ["input", "labels", *names]
    grads = [f"{n}_grad" for n in names]
    assert [o.name for o in session.get_outputs()] == ["output", "loss", *grads]
    for rows in (32, 7):
        model.zero_grad()
        a, b = torch.randn(rows, 10), torch.randint(0, 2, (rows, 1)).float()
        want = model(a)
        loss = binary_cross_entropy(want, b)
        loss.backward()
        values = {n: p.detach().numpy() for n, p in model.named_parameters()}
        got = session.run(None, {"input": a.numpy(), "labels": b.numpy(), **values})
        np.testing.assert_allclose(got[0], want.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], loss.item(), rtol=1e-5)
        for g, p in zip(got[2:], model.parameters(), strict=True):
            np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-4, atol=1e-6)


def run(path: Path, model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> dict:
    session = onnxruntime.InferenceSession(str(path))
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    feeds = {"input": x.numpy(), "labels": labels.numpy(), **values}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize(
    "opset", [12, *(pytest.param(n, marks=pytest.mark.full) for n in (9, 15, 22, 26))]
)
def test_another_opset_gives_the_same_results(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = MyModel(), tmp_path / "g.onnx"
    x, labels = torch.randn(6, 10), torch.randint(0, 2, (6, 1)).float()
    export_gradient_graph(model, binary_cross_entropy, x, labels, path, opset)
    assert [(o.domain, o.version) for o in onnx.load(path).opset_import] == [("", opset)]
    loss = binary_cross_entropy(model(x), labels)
    loss.backward()
    got = run(path, model, x, labels)
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-5)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(got[f"{name}_grad"], p.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_opsets_that_cannot_be(tmp_path: Path) -> None:
    model, x, labels = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    path = tmp_path / "g.onnx"
    for opset in (6, 27):
        with pytest.raises(LoweringError, match=f"unknown opset: {opset}"):
            export_gradient_graph(model, nn.CrossEntropyLoss(), x, labels, path, opset)
        with pytest.raises(LoweringError, match=f"unknown opset: {opset}"):
            export_optimizer_graph(model.named_parameters(), opset_version=opset)
    with pytest.raises(LoweringError, match=r"(?s)lowered to opset 9.*GatherElements"):
        export_gradient_graph(model, nn.CrossEntropyLoss(), x, labels, path, opset_version=9)
    assert not path.exists()


def test_frozen_parameters_are_inputs_without_gradient(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), tmp_path / "g.onnx"
    model[0].weight.requires_grad_(False)
    x, labels = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    export_gradient_graph(model, nn.CrossEntropyLoss(), x, labels, path)
    session = onnxruntime.InferenceSession(str(path))
    assert [i.name for i in session.get_inputs()][2:] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    kept = [o.name for o in session.get_outputs()][2:]
    assert kept == ["0.bias_grad", "2.weight_grad", "2.bias_grad"]


@pytest.mark.parametrize(
    ("ours", "theirs", "opset"),
    [
        ("adam", torch.optim.Adam, 21),
        ("adam", torch.optim.Adam, 12),
        (optim.SGD(momentum=0.9), torch.optim.SGD, 21),
        (optim.SGD(momentum=0.9), torch.optim.SGD, 9),
    ],
    ids=["adam", "adam-12", "sgd", "sgd-9"],
)
def test_optimizer_graph(ours, theirs, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Linear(3, 2), tmp_path / "optimizer.onnx"
    made = export_optimizer_graph(model.named_parameters(), ours, path, opset)
    assert [o.version for o in made.opset_import if not o.domain] == [opset]
    session = onnxruntime.InferenceSession(str(path))
    inputs = {i.name: i for i in session.get_inputs()}
    values = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    assert {f"weight{s}" for s in ("", ".gradient", ".learning_rate", ".step")} <= set(inputs)
    rate = 0.01
    extra = {"momentum": 0.9} if theirs is torch.optim.SGD else {}
    opt = theirs(model.parameters(), lr=rate, **extra)
    state = {
        n: np.zeros(i.shape, np.float32)
        for n, i in inputs.items()
        if n not in values and not n.endswith((".gradient", ".learning_rate", ".step"))
    }
    steps = {f"{n}.step": np.array([1], np.int64) for n in values}
    for _ in range(5):
        feeds = {**values, **state, **steps}
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            feeds[f"{name}.gradient"] = p.grad.numpy()
            feeds[f"{name}.learning_rate"] = np.array([rate], np.float32)
        opt.step()
        names = [o.name for o in session.get_outputs()]
        out = dict(zip(names, session.run(None, feeds), strict=True))
        values = {n: out[f"{n}.out"] for n in values}
        state = {n: out[f"{n}.out"] for n in state}
        steps = {n: out[f"{n}.out"] for n in steps}
        for name, p in model.named_parameters():
            np.testing.assert_allclose(values[name], p.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert steps["weight.step"].tolist() == [6]
