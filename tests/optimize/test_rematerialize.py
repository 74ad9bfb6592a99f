"""rematerialize: equal values, and less memory for the backward pass."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import parser
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.artifacts import Artifacts
from onnxtrain.graph.memory_usage import forward_nodes
from onnxtrain.targets import find
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer

ROWS, WIDTH = 5, 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "REMATERIALIZE_BYTES", 1)


class Net(nn.Module):
    """A root-mean-square norm, a wide layer and a head, for sequences or single rows."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.bend = nn.GELU(approximate=approximate)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.down(self.bend(self.up(x)))


def made(shape: tuple[int, ...], approximate: str = "none", **options: Any) -> Artifacts:
    model = from_torch(Net(approximate), (torch.zeros(shape),), train=True)
    return onnxtrain.build(model, loss="mse", optimizer=optim.SGD(lr=0.1), target="cuda", **options)


def counts(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in model.graph.node)


def kept(model: onnx.ModelProto) -> set[str]:
    """Return the operators whose results the backward pass reads."""
    graph = ir.from_proto(model).graph
    early = forward_nodes(graph)
    late = [x for n in graph if n not in early for x in n.inputs if x is not None]
    return {p.op_type for x in late if (p := x.producer()) is not None and p in early}


@pytest.mark.parametrize("shape", [(3, ROWS, WIDTH), (ROWS, WIDTH)], ids=["rows", "matrix"])
def test_losses_are_those_of_torch(shape: tuple[int, ...]) -> None:
    artifacts = made(shape)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trainer = Trainer(artifacts)
    got = [trainer.step(x, y).loss for _ in range(5)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, ROWS, WIDTH), (ROWS, WIDTH)], ids=["rows", "matrix"])
def test_recomputed_values_have_the_same_bits(shape: tuple[int, ...]) -> None:
    models = [made(shape, recompute=r).models["step"] for r in ((), "none")]
    results = []
    for model in models:
        session = onnxruntime.InferenceSession(model.SerializeToString())
        rng = np.random.default_rng(1)
        feeds = {
            x.name: (
                rng.standard_normal([3 if isinstance(d, str) else d for d in x.shape]) + 1
            ).astype(np.int64 if "int64" in x.type else np.float32)
            for x in session.get_inputs()
        }
        results.append(session.run(None, feeds))
    assert counts(models[0])["Gelu"] == 2
    assert counts(models[1])["Gelu"] == 1
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_values_of_one_pass_are_not_stored() -> None:
    again, plain = (kept(made((3, ROWS, WIDTH), recompute=r).models["step"]) for r in ((), "none"))
    assert "Gelu" in plain
    assert "Gelu" not in again


def test_values_that_the_gradient_reads_are_stored() -> None:
    assert counts(made((3, ROWS, WIDTH), "tanh").models["step"])["Gelu"] == 1


def test_small_values_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "REMATERIALIZE_BYTES", 1 << 30)
    assert counts(made((3, ROWS, WIDTH)).models["step"])["Gelu"] == 1


@pytest.mark.parametrize("word", ["none", ["none"]])
def test_targets_without_the_preference_store_all(word: Any) -> None:
    artifacts = made((3, ROWS, WIDTH), recompute=word)
    assert counts(artifacts.models["step"])["Gelu"] == 1
    assert artifacts.manifest.options["recompute"] == word


def test_scaled_rows_are_recomputed() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[b, 3, 8] x) => (float[b, 3, 8] y) {
        e = Constant<value_float = 0.01>() two = Constant<value_float = 2.0>()
        w = Constant<value_ints = [-1]>()
        s = Pow(x, two) m = ReduceMean(s, w) v = Add(m, e) d = Sqrt(v) r = Reciprocal(d)
        h = Mul(x, r) y = Mul(h, h) }"""
    model = parser.parse_model(text)
    target = find("cuda")
    plain = onnxtrain.vjp(model, wrt=["x"], target=target.without("rematerialize"))
    again = onnxtrain.vjp(model, wrt=["x"], target=target)
    assert counts(again)["Mul"] == counts(plain)["Mul"] + 1
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((4, 3, 8)).astype(np.float32) for n in ("x", "y_grad")}
    results = [
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds) for m in (plain, again)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
