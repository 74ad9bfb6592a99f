"""fuse_attention: equal results, and no scores in the forward pass."""

from __future__ import annotations

import collections
import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser
from onnx_ir import DataType

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.graph import attention_scores
from onnxtrain.torch import from_torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
SIZES = {"q": (2, 3, 24, 8), "k": (2, 3, 8, 24), "v": (2, 3, 24, 8), "y_grad": (2, 3, 24, 8)}
SCALE = 1 / math.sqrt(8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # onnxruntime's CPU has no products in bfloat16: the same graphs in float32.
    monkeypatch.setattr(
        attention_scores, "FUSED_ATTENTION_DTYPES", (DataType.FLOAT, DataType.BFLOAT16)
    )
    monkeypatch.setattr(thresholds, "REMATERIALIZE_BYTES", 1)


def made(more: str = "", scores: str = "t", last: str = "Neg") -> onnx.ModelProto:
    inputs = ", ".join(f"float[{', '.join(map(str, SIZES[n]))}] {n}" for n in "qkv")
    text = f"""g ({inputs}, float[1, 1, 24, 24] m) => (float[2, 3, 24, 8] y) {{
        c = Constant<value_float = {SCALE}>() s = MatMul(q, k) t = Mul(s, c) {more}
        p = Softmax({scores}) o = MatMul(p, v) y = {last}(o) }}"""
    return onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["q", "k", "v"], target="cuda")


def counts(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in model.graph.node)


def given(name: str) -> np.ndarray:
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.standard_normal(SIZES.get(name, (1, 1, 24, 24))).astype(np.float32)


def test_results_and_gradients_are_those_of_torch() -> None:
    model = made()
    assert counts(model)["Attention"] == 1
    assert counts(model)["Softmax"] == 1, "for the gradient"
    session = onnxruntime.InferenceSession(model.SerializeToString())
    got = session.run(None, {x.name: given(x.name) for x in session.get_inputs()})
    q, k, v = (torch.tensor(given(n), dtype=torch.float64, requires_grad=True) for n in "qkv")
    y = -(torch.softmax(q @ k * SCALE, -1) @ v)
    dy = torch.tensor(given("y_grad"), dtype=torch.float64)
    for a, b in zip(got, [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)], strict=True):
        np.testing.assert_allclose(np.asarray(a), b.numpy(), rtol=1e-5, atol=1e-5)


def test_masked_scores_stay() -> None:
    model = made("u = Add(t, m)", "u")
    assert counts(model)["Attention"] == 0
    assert counts(model)["Softmax"] == 1


def test_float32_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_scores, "FUSED_ATTENTION_DTYPES", (DataType.BFLOAT16,))
    assert counts(made())["Attention"] == 0


def test_no_upgrade_of_an_opset_that_changes_another_operator() -> None:
    model = made(last="ThresholdedRelu")
    assert counts(model)["Attention"] == 0


class Heads(torch.nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(4, 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(4, 24, 16))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_a_built_step_has_it_where_it_is_fast(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_scores, "FUSED_ATTENTION_DTYPES", (DataType.BFLOAT16,))
    net = from_torch(Heads(), (torch.zeros(4, 24, 16),), train=True, dynamic_batch=False)
    options = {"loss": "mse", "optimizer": optim.AdamW(), "target": "cuda", "precision": precision}
    artifacts = onnxtrain.build(net, **options)
    for role in ("gradients", "step"):
        model = artifacts.models[role]
        assert counts(model)["Attention"] == (precision == "bf16-mixed")
        onnx.checker.check_model(model)
    older = onnxtrain.build(net, recompute="none", **options)
    assert counts(older.models["step"])["Attention"] == 0
