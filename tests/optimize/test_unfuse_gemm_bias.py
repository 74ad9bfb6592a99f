"""unfuse_gemm_bias: biases are added after large matmuls on CUDA."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import parser
from torch import nn

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.matmul import unfuse_gemm_bias
from onnxtrain.runtime import session as runtime
from onnxtrain.torch import from_torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MEMORY_BOUND_ELEMENTS", 12)


def graph(line: str, x: str = "2,3,4", bias: str = "5", y: str = "2,3,5") -> str:
    w = "5,4" if "transB" in line else "4,5"
    return f"g (float[{x}] x, float[{w}] w, float[{bias}] b) => (float[{y}] y) {{ {line} }}"


def rewritten(text: str) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    model = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    made = ir.from_proto(model)
    count = unfuse_gemm_bias(made, OpBuilder(made.graph, "t/", target="cuda"))
    return count, model, ir.to_proto(simplify(made))


def result(model: onnx.ModelProto) -> np.ndarray:
    session = runtime.create(model.SerializeToString())
    rng = np.random.default_rng(0)
    feeds = {
        i.name: rng.standard_normal([d if isinstance(d, int) else 2 for d in i.shape]).astype("f4")
        for i in sorted(session.get_inputs(), key=lambda i: i.name)
    }
    (y,) = runtime.run(session, ["y"], feeds)
    return y


MATMUL = "p = MatMul(x, w) y = Add(p, b)"
FLAT = {"x": "6,4", "y": "6,5"}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (graph(MATMUL), ["MatMul", "Reshape", "Add", "Reshape"]),
        (graph("p = MatMul(x, w) y = Add(b, p)"), ["MatMul", "Reshape", "Add", "Reshape"]),
        (graph(MATMUL, **FLAT), ["MatMul", "Reshape", "Add", "Reshape"]),
        (graph("y = Gemm(x, w, b)", **FLAT), ["Gemm", "Add"]),
        (graph("y = Gemm<transB=1, alpha=0.5>(x, w, b)", **FLAT), ["Gemm", "Add"]),
        # Of another factor, a column, a number, a small result, and of an unknown number of rows.
        (graph("y = Gemm<beta=0.5>(x, w, b)", **FLAT), ["Gemm"]),
        (graph("y = Gemm(x, w, b)", bias="6,1", **FLAT), ["Gemm"]),
        (graph(MATMUL, bias="1"), ["MatMul", "Add"]),
        (graph("y = Gemm(x, w, b)", x="2,4", y="2,5"), ["Gemm"]),
        (graph(MATMUL, x="n,3,4", y="n,3,5"), ["MatMul", "Add"]),
    ],
)
def test_the_bias_is_a_separate_add(text: str, kinds: list[str]) -> None:
    count, before, after = rewritten(text)
    assert [n.op_type for n in after.graph.node] == kinds
    assert count == (len(kinds) != len(before.graph.node))
    onnx.checker.check_model(after, full_check=True)
    np.testing.assert_allclose(result(after), result(before), rtol=1e-6, atol=1e-6)


def test_the_reshape_changes_the_shape() -> None:
    """One that does not would be taken out, and the product joined with its bias again."""
    for sizes in ({}, FLAT):
        _, _, after = rewritten(graph(MATMUL, **sizes))
        shapes = {
            v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in onnx.shape_inference.infer_shapes(after).graph.value_info
        }
        first = after.graph.node[1]
        assert shapes[first.input[0]] != shapes[first.output[0]]


class Layers(nn.Module):
    """Two layers over rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def test_gradients_are_those_of_other_targets() -> None:
    model = from_torch(Layers(), (torch.randn(2, 3, 4),), dynamic_batch=False)
    made = {t: onnxtrain.vjp(model, target=t) for t in ("cpu", "cuda")}
    kinds = collections.Counter(n.op_type for n in made["cuda"].graph.node)
    biases = [n for n in made["cuda"].graph.node if n.op_type == "Gemm" and len(n.input) > 2]
    assert not biases
    assert kinds["Add"] == 3
    results = []
    for proto in made.values():
        session = runtime.create(proto.SerializeToString())
        names = [o.name for o in session.get_outputs()]
        feeds = {
            i.name: np.random.default_rng(len(i.name)).standard_normal(i.shape).astype("f4")
            for i in session.get_inputs()
        }
        results.append(dict(zip(names, runtime.run(session, names, feeds), strict=True)))
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name)
