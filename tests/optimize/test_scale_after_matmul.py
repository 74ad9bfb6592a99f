"""scale_after_matmul with matmuls in bfloat16."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import parser
from onnx.reference import ReferenceEvaluator

import onnxtrain
from onnxtrain import optim

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 16] x) => (float[n, 4096] y) { h = MatMul(x, v) y = MatMul(h, w) }"""
RNG = np.random.default_rng(0)
WEIGHTS = {
    "v": (RNG.standard_normal((16, 16)) / 4).astype(np.float32),
    "w": (RNG.standard_normal((16, 4096)) / 4).astype(np.float32),
}
X = RNG.standard_normal((5, 16)).astype(np.float32)
LABELS = np.array([1, 4000, 7, 7, 4095])


def training(precision: str) -> onnx.ModelProto:
    """Return the model that gives gradients."""
    model = parser.parse_model(TEXT)
    weights = (ir.tensor(a, name=n) for n, a in WEIGHTS.items())
    model.graph.initializer.extend(ir.serde.serialize_tensor(w) for w in weights)
    artifacts = onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer=optim.SGD(lr=0.1),
        target="cuda",
        precision=precision,
        check=False,
    )
    return artifacts.models["train"]


def test_rows_are_rounded_before_they_are_scaled() -> None:
    model = onnx.shape_inference.infer_shapes(training("bf16-mixed"))
    widths = {
        v.name: v.type.tensor_type.shape.dim[-1].dim_value
        for v in model.graph.value_info
        if v.type.tensor_type.shape.dim
    }
    scaled = [n for n in model.graph.node if n.op_type == "Mul"]
    assert scaled
    assert all(widths.get(n.output[0]) != 4096 for n in scaled)
    feeds = {"x": X, "labels": LABELS, **WEIGHTS}
    for v in model.graph.input:
        shape = [d.dim_value for d in v.type.tensor_type.shape.dim]
        if v.name not in feeds:
            first = v.type.tensor_type.elem_type == onnx.TensorProto.BOOL
            feeds[v.name] = np.ones(shape, bool) if first else np.zeros(shape, np.float32)
    names = [y.name for y in model.graph.output]
    have = dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    v, w = (torch.tensor(WEIGHTS[n], requires_grad=True) for n in "vw")
    loss = torch.nn.functional.cross_entropy(torch.tensor(X) @ v @ w, torch.tensor(LABELS))
    for name, want in zip("vw", torch.autograd.grad(loss, (v, w)), strict=True):
        got = np.asarray(have[f"{name}_grad.accumulation.out"], np.float32)
        error = np.abs(got - want.numpy()).max() / np.abs(want.numpy()).max()
        assert error < 2e-2, (name, error)
