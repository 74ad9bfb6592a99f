"""Gradients of LayerNormalization on GPUs: one Sum, which also adds the residual's gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser
from torch.nn import functional as F

import onnxtrain
from onnxtrain import thresholds
from tests.cases import checks
from tests.cases.base import OpCase
from tests.cases.norm import CASES

NORMS = [c for c in CASES if c.op == "LayerNormalization"]
SHAPE = (2, 6, 192)


def block(scale: str = "scale") -> onnx.ModelProto:
    """Return a LayerNormalization with a residual connection."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2,6,192] x, float[192] scale, float[192] bias) => (float[2,6,192] y)
    <float[192] ones = {{{", ".join(["1"] * 192)}}}> {{
        n = LayerNormalization(x, {scale})
        t = Tanh(n)
        y = Add(x, t)
    }}"""
    return parser.parse_model(text)


def torch_block(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x + torch.tanh(F.layer_norm(x, (192,), scale, bias))


def input_values(name: str) -> np.ndarray:
    """Return the values of an input; the rows have nonzero means."""
    rng = np.random.default_rng(len(name))
    shape = (192,) if name in ("scale", "bias") else SHAPE
    return (1.5 * rng.standard_normal(shape) + 2.0).astype(np.float32)


def run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {v.name: input_values(v.name) for v in session.get_inputs()}
    names = [v.name for v in session.get_outputs()]
    return dict(zip(names, (np.asarray(a) for a in session.run(names, feeds)), strict=True))


@pytest.mark.parametrize("scale", ["scale, bias", "scale", "ones"])
def test_the_residual_gradient_is_part_of_the_sum(scale: str) -> None:
    wrt = ["x", *(n for n in scale.split(", ") if n != "ones")]
    vjp = onnxtrain.vjp(block(scale), wrt=wrt, target="cuda")
    kinds = [n.op_type for n in vjp.graph.node]
    assert [len(n.input) for n in vjp.graph.node if n.op_type == "Sum"] == [3]
    assert (kinds.count("LayerNormalization"), kinds.count("Gemm")) == (1, 2)
    assert not {"Sub", "ReduceMean"} & set(kinds[kinds.index("Tanh") + 3 :])
    leaves = {
        n: torch.tensor(input_values(n), dtype=torch.float64, requires_grad=True) for n in wrt
    }
    one = torch.ones(192, dtype=torch.float64)
    y = torch_block(leaves["x"], leaves.get("scale", one), leaves.get("bias"))
    upstream = torch.tensor(input_values("y_grad")).double()
    expected = torch.autograd.grad(y, list(leaves.values()), upstream)
    results = run(vjp)
    for name, gradient in zip(wrt, expected, strict=True):
        actual = results[f"{name}_grad"]
        np.testing.assert_allclose(actual, gradient.numpy(), rtol=1e-4, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("case", NORMS, ids=lambda c: c.name)
def test_layer_norm_cases_with_the_gpu_kernel(
    case: OpCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "NORM_KERNEL_POSITIONS", 1)
    checks.targets(case)


def test_second_derivatives() -> None:
    first = onnxtrain.vjp(block(), wrt=["x"], target="cuda")
    model = onnx.ModelProto.FromString(first.SerializeToString())
    del model.graph.output[:]
    (x_grad,) = (o for o in first.graph.output if o.name == "x_grad")
    model.graph.output.append(x_grad)
    second = onnxtrain.vjp(model, wrt=["x"], target="cuda")
    x, scale, dy = (
        torch.tensor(input_values(n), dtype=torch.float64, requires_grad=True)
        for n in ("x", "scale", "y_grad")
    )
    y = torch_block(x, scale, None)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    names = {v.name for v in second.graph.input}
    (cotangent,) = names - {v.name for v in model.graph.input}
    (expected,) = torch.autograd.grad(dx, x, torch.tensor(input_values(cotangent)).double())
    (name,) = (o.name for o in second.graph.output if o.name != "x_grad")
    np.testing.assert_allclose(run(second)[name], expected.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", ["cpu", "wasm", "webgpu", "portable"])
def test_other_targets_use_elementwise_operators(target: str) -> None:
    vjp = onnxtrain.vjp(block(), wrt=["x"], target=target)
    assert not {n.op_type for n in vjp.graph.node} & {"Sum", "BatchNormalization"}


def test_an_unknown_number_of_rows_uses_elementwise_operators() -> None:
    model = block()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    vjp = onnxtrain.vjp(model, wrt=["x"], target="cuda")
    assert "BatchNormalization" not in {n.op_type for n in vjp.graph.node}
