"""Attention passes for CUDA together, in a small transformer, also in 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.torch import from_torch
from tests.emulated_bfloat16 import emulated


class Block(nn.Module):
    """A layer of a causal transformer over 16 tokens, two heads of width 4, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.behind = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, 2, 4)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        seen = torch.arange(16)[None, :] <= torch.arange(16)[:, None]
        mask = torch.where(seen.expand(x.shape[0], 1, 16, 16), 0.0, float("-inf"))
        p = torch.softmax(q @ k.transpose(-1, -2) * 0.5 + mask, -1)
        p = torch.where(torch.isnan(p), 0.0, p)
        x = x + self.mix((p @ v).transpose(1, 2).flatten(2))
        return self.out(self.behind(x).flatten(1))


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "COALESCED_BROADCAST_ELEMENTS", 1)
    monkeypatch.setattr(thresholds, "ROW_SUBTRACTION_COLUMN_RATIO", 4)


def built(precision: str, **options: Any) -> onnxtrain.Artifacts:
    return onnxtrain.build(
        from_torch(Block(), (torch.randn(3, 16, 8),)),
        loss="cross_entropy",
        optimizer=optim.SGD(lr=0.3),
        target="cuda",
        precision=precision,
        **options,
    )


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("dims", [{}, {"batch": 3}], ids=["any batch", "fixed"])
def test_losses_follow_torch(dims: dict[str, int]) -> None:
    module = Block()
    trainer = onnxtrain.Trainer(built("float32", dims=dims))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for seed in range(6):
        torch.manual_seed(seed)
        x, labels = torch.randn(3, 16, 8), torch.randint(0, 3, (3,))
        loss = nn.functional.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), labels.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-5, err_msg=name
        )


def gradients(artifacts: onnxtrain.Artifacts) -> dict[str, np.ndarray]:
    """Return what the model of a batch gives; bfloat16 is rounded to, as a GPU does."""
    proto = emulated(artifacts.models["train"])
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng, feeds = np.random.default_rng(0), {}
    weights = artifacts.values
    for x in sorted(session.get_inputs(), key=lambda x: x.name):
        if x.name in weights:
            feeds[x.name] = weights[x.name]
        elif "int64" in x.type:
            feeds[x.name] = np.array([0, 2, 1])
        elif "bool" in x.type:
            feeds[x.name] = np.array([True])
        else:
            feeds[x.name] = rng.standard_normal(x.shape).astype(np.float32)
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def broadcasts(proto: onnx.ModelProto) -> list[tuple[str, list[int], list[int]]]:
    """Return the sums, differences and products that take a kernel for any broadcast."""
    graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    dims = {t.name: list(t.dims) for t in graph.initializer}
    for v in (*graph.value_info, *graph.input, *graph.output):
        dims[v.name] = [d.dim_value for d in v.type.tensor_type.shape.dim]
    slow = []
    for node in graph.node:
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            a, b = (dims[x] for x in node.input)
            if a != b and min(np.prod(a), np.prod(b)) > 1 and sum(d != 1 for d in b) != 1:
                slow.append((node.op_type, a, b))
    return slow


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_coalesced_axes_give_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = built(precision, dims={"batch": 3})
    monkeypatch.setattr(thresholds, "COALESCED_BROADCAST_ELEMENTS", 1)
    flat = built(precision, dims={"batch": 3})
    assert broadcasts(plain.models["train"])
    # In float32 onnxruntime adds the mask inside the softmax.
    left = [("Add", [3, 2, 16, 16], [1, 1, 16, 16])] if precision == "float32" else []
    assert broadcasts(flat.models["train"]) == left
    want, have = gradients(plain), gradients(flat)
    assert want.keys() == have.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(have[name], array, err_msg=name)


def test_folded_row_subtraction_is_as_exact_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "COALESCED_BROADCAST_ELEMENTS", 1)
    exact, plain = (gradients(built(p, dims={"batch": 3})) for p in ("float32", "bf16-mixed"))
    monkeypatch.setattr(thresholds, "ROW_SUBTRACTION_COLUMN_RATIO", 4)
    artifacts = built("bf16-mixed", dims={"batch": 3})
    counts = [n.op_type for n in artifacts.models["train"].graph.node]
    assert counts.count("Expand") == 1
    inside = gradients(artifacts)
    (name,) = (n for n in exact if n.startswith("qkv.weight"))  # what the scores' gradient reaches
    errors = [np.abs(g[name] - exact[name]).mean() for g in (plain, inside)]
    assert 0 < errors[1] < 1.1 * errors[0]
