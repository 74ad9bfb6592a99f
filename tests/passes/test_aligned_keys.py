"""A few keys more in attention: rows of scores are whole words, and the numbers stay the same."""

from __future__ import annotations

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
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.passes.gpu.aligned_keys import aligned_keys
from onnxtrain.torch import from_torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
INPUTS = "float[2,3,5,4] q, float[2,3,4,13] k, float[2,3,13,4] v"
PLAIN = "s = MatMul(q, k) p = Softmax<axis=-1>(s) y = MatMul(p, v)"
MASKED = "s = MatMul(q, k) h = Mul(s, half) a = Add({}) p = Softmax<axis=-1>(a) y = MatMul(p, v)"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "FLAT_ELEMENTS", 8)


def rewritten(
    body: str, inputs: str = INPUTS, outputs: str = "float[2,3,5,4] y"
) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    numbers = "<float half = {0.5}>"
    before = parser.parse_model(f"{HEAD} g ({inputs}) => ({outputs}) {numbers} {{{body}}}")
    onnx.checker.check_model(before, full_check=True)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before, data_prop=True))
    changed = aligned_keys(model, OpBuilder(model.graph, "t/", target="cuda"))
    simplify(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    return changed, before, after


def results(proto: onnx.ModelProto) -> list[np.ndarray]:
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    feeds = {}
    for x in session.get_inputs():
        feeds[x.name] = (20 * rng.standard_normal(x.shape) - 40).astype(np.float32)  # below zero
    return session.run(None, feeds)


@pytest.mark.parametrize(
    ("body", "mask", "sums"),
    [
        (PLAIN, None, 1),
        (PLAIN.replace("Softmax<axis=-1>", "Softmax<axis=3>"), None, 1),
        (MASKED.format("h, m"), "2,1,1,13", 1),
        (MASKED.format("m, h"), "5,13", 1),
        (MASKED.format("h, m"), "1,1,5,13", 1),
    ],
)
def test_keys_are_added_and_take_no_part(body: str, mask: str | None, sums: int) -> None:
    inputs = INPUTS if mask is None else f"{INPUTS}, float[{mask}] m"
    changed, before, after = rewritten(body, inputs)
    assert changed == 1
    assert [n.op_type for n in after.graph.node].count("Add") == sums
    inferred = onnx.shape_inference.infer_shapes(after, data_prop=True).graph
    dims = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.value_info
    }
    assert dims["s"] == dims["p"] == [2, 3, 5, 16]
    for a, b in zip(results(before), results(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        (PLAIN, INPUTS.replace("13", "16"), "float[2,3,5,4] y"),
        (PLAIN, INPUTS.replace("13", "7"), "float[2,3,5,4] y"),
        (PLAIN, INPUTS.replace("2,3", "n,3"), "float[n,3,5,4] y"),
        (PLAIN + " z = Neg(p)", INPUTS, "float[2,3,5,4] y, float[2,3,5,13] z"),
        (PLAIN, INPUTS, "float[2,3,5,4] y, float[2,3,5,13] p"),
        (PLAIN.replace("axis=-1", "axis=2"), INPUTS, "float[2,3,5,4] y"),
        (MASKED.format("h, m"), INPUTS + ", float[2,3,5,1] m", "float[2,3,5,4] y"),
        (MASKED.format("h, m"), INPUTS + ", float[2,3,5,13] m", "float[2,3,5,4] y"),
        (
            PLAIN.replace("Softmax<axis=-1>(s)", "Softmax<axis=-1>(h)").replace(
                "p =", "a = Add(s, m) h = Mul(a, half) p ="
            ),
            INPUTS + ", float[13] m",
            "float[2,3,5,4] y",
        ),
        (
            PLAIN.replace("p = Softmax<axis=-1>(s)", "t = Tanh(s) p = Softmax<axis=-1>(t)"),
            INPUTS,
            "float[2,3,5,4] y",
        ),
    ],
    ids=[
        *("whole words", "few keys", "unknown sizes", "read twice", "an output", "another axis"),
        *("no number per key", "a mask as large as scores", "a mask that is scaled"),
        "what is not linear",
    ],
)
def test_what_only_looks_alike_stays(body: str, inputs: str, outputs: str) -> None:
    changed, before, after = rewritten(body, inputs, outputs)
    assert changed == 0
    assert len(after.graph.node) == len(before.graph.node)


def test_keys_that_a_file_masks_come_before_those_that_are_added() -> None:
    """A row that sees nothing has equal weights if the mask is a large number."""
    body = "low = Mul(m, large)" + MASKED.format("h, low")
    proto = parser.parse_model(
        f"{HEAD} g ({INPUTS}, float[13] m) => (float[2,3,5,4] y)"
        f"<float half = {{0.5}}, float large = {{-3e38}}> {{{body}}}"
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    assert aligned_keys(model, OpBuilder(model.graph, "t/", target="cuda")) == 1
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 4, 13), "v": (2, 3, 13, 4)}
    feeds = {n: rng.standard_normal(d).astype(np.float32) for n, d in shapes.items()}
    session: Any = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (y,) = session.run(None, {**feeds, "m": np.ones(13, np.float32)})
    want = np.broadcast_to(feeds["v"].mean(-2, keepdims=True), y.shape)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)


class Sees(nn.Module):
    """Attention of two heads over 13 tokens."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.causal = nn.Linear(8, 24), nn.Linear(8, 3), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        mask = torch.triu(torch.full((13, 13), float("-inf")), 1) if self.causal else 0.0
        scores = q @ k.transpose(-1, -2) * 0.5
        p = torch.softmax(scores + mask if self.causal else scores, -1)
        return self.out((p @ v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("causal", [False, True])
def test_training_follows_torch(causal: bool) -> None:
    module = Sees(causal)
    artifacts = onnxtrain.build(
        from_torch(module, (torch.randn(3, 13, 8),)),
        loss="cross_entropy",
        optimizer=optim.SGD(lr=0.3),
        target="cuda",
        dims={"batch": 3},
    )
    graph = artifacts.models["step"].graph
    dims = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info]
    assert [3, 2, 13, 16] in dims
    assert [3, 2, 13, 13] not in dims
    trainer = onnxtrain.Trainer(artifacts)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for seed in range(5):
        torch.manual_seed(seed)
        x, labels = torch.randn(3, 13, 8), torch.randint(0, 3, (3,))
        loss = nn.functional.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), labels.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-5, err_msg=name
        )
