"""Variants of linear layers on the CPU return torch's gradients on both sides of thresholds."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onnxtrain import build, optim
from onnxtrain.losses import CrossEntropy
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer


def check(net: nn.Module, x: torch.Tensor, labels: torch.Tensor, **options) -> onnx.ModelProto:
    """Take a step of size 1, compare gradients with torch's in float64, return the graph."""
    axis, dynamic = options.pop("axis", 1), options.pop("dynamic", False)
    loss = CrossEntropy(axis=axis, ignore_index=0)
    model = from_torch(net, (x,), dynamic_batch=dynamic)
    artifacts = build(model, loss=loss, optimizer=optim.SGD(lr=1.0), **options)
    trainer = Trainer(artifacts, threads=1)
    before = {n: np.array(v) for n, v in trainer.parameters.items()}
    actual = trainer.step(x.numpy(), labels.numpy()).loss
    exact = copy.deepcopy(net).double()
    scores = exact(x.double())
    expected = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=0)
    expected.backward()
    assert actual == pytest.approx(expected.item(), rel=1e-5)
    for name, p in exact.named_parameters():
        assert p.grad is not None
        gradient = before[name] - trainer.parameters[name]
        scale = p.grad.abs().max().item()
        np.testing.assert_allclose(gradient, p.grad.numpy(), rtol=2e-4, atol=2e-5 * scale)
    return artifacts.models["train"]


def shapes_of(graph: onnx.ModelProto, kind: str) -> list[tuple]:
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    known = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    return [known.get(n.output[0], ()) for n in inferred.node if n.op_type == kind]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("classes", [40, 700])
def test_scale_of_wide_scores(classes: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, classes))
    x, labels = torch.randn(3, 5, 6), torch.randint(0, classes, (3, 5))
    graph = check(net, x, labels, axis=-1, dynamic=dynamic)
    scaled = [s for s in shapes_of(graph, "Mul") if s and s[-1] == classes and len(s) == 2]
    assert bool(scaled) == (classes == 40)


def test_scale_of_wide_scores_with_other_readers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 600), nn.Tanh())
    graph = check(net, torch.randn(7, 6), torch.randint(0, 600, (7,)))
    assert (7, 600) in shapes_of(graph, "Mul")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("width", "out", "rows"), [(700, 200, 9), (8, 2000, 512), (700, 20, 9), (8, 2000, 64)]
)
def test_weight_gradients(width: int, out: int, rows: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(width, out)
    graph = check(net, torch.randn(rows, width), torch.randint(0, out, (rows,)), dynamic=dynamic)
    quick = out == 200 or (rows == 512 and not dynamic)
    assert any(n.op_type == "Gemm" and _transposed(n) for n in graph.graph.node) != quick


def _transposed(node: onnx.NodeProto) -> bool:
    return any(a.name == "transA" and a.i for a in node.attribute)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_queries_keys_and_values_are_split_without_a_transpose(dynamic: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = nn.Sequential(layer, nn.Linear(8, 5)).train()
    x, labels = torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))
    graph = check(net, x, labels, axis=-1, dynamic=dynamic).graph
    splits = [n for n in graph.node if n.op_type == "Split" and n.name.startswith("parts/")]
    assert [len(n.output) for n in splits] == [3]
    assert not any(n.op_type == "Transpose" and _rank(n) == 5 for n in graph.node)


def _rank(node: onnx.NodeProto) -> int:
    return next(len(a.ints) for a in node.attribute if a.name == "perm")
