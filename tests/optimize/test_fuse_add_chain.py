"""fuse_add_chain: one Sum adds three or more tensors on CUDA."""

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
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize import reductions as module
from onnxtrain.optimize.reductions import fuse_add_chain
from onnxtrain.runtime import session as runtime
from onnxtrain.torch import from_torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
NAMES = "abcdefghij"


def chain(lines: str, outputs: str = "float[2,3] y", kind: str = "float", count: int = 4) -> str:
    """Return the text of a graph over tensors of one shape."""
    takes = ", ".join(f"{kind}[2,3] {n}" for n in NAMES[:count])
    return f"g ({takes}, {kind}[3] row, {kind}[n,3] any) => ({outputs}) {{ {lines} }}"


def rewritten(text: str) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    model = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    made = ir.from_proto(model)
    count = fuse_add_chain(made, OpBuilder(made.graph, "t/", target="cuda"))
    return count, model, ir.to_proto(simplify(made))


def kinds(model: onnx.ModelProto) -> dict[str, int]:
    return dict(collections.Counter(n.op_type for n in model.graph.node))


def results(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = runtime.create(model.SerializeToString())
    rng = np.random.default_rng(0)
    feeds = {
        i.name: rng.standard_normal([d if isinstance(d, int) else 2 for d in i.shape]).astype("f4")
        for i in sorted(session.get_inputs(), key=lambda i: i.name)
    }
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, runtime.run(session, names, feeds), strict=True))


@pytest.mark.parametrize(
    ("lines", "outputs", "wanted"),
    [
        ("p = Add(a, b) q = Add(p, c) y = Add(q, d)", "float[2,3] y", {"Sum": 1}),
        ("p = Add(a, b) q = Add(c, d) y = Add(p, q)", "float[2,3] y", {"Sum": 1}),
        ("p = Add(a, a) y = Add(p, a)", "float[2,3] y", {"Sum": 1}),
        ("p = Add(a, b) q = Add(c, p) y = Neg(q)", "float[2,3] y", {"Sum": 1, "Neg": 1}),
        ("y = Add(a, b)", "float[2,3] y", {"Add": 1}),
        # Read twice, or a result itself.
        ("p = Add(a, b) q = Add(p, c) y = Mul(q, p)", "float[2,3] y", {"Add": 2, "Mul": 1}),
        ("p = Add(a, b) y = Add(p, c)", "float[2,3] p, float[2,3] y", {"Add": 2}),
        # Broadcast, and of a size that may be 1.
        ("p = Add(a, row) y = Add(p, c)", "float[2,3] y", {"Add": 2}),
        ("p = Add(a, any) y = Add(p, c)", "float[2,3] y", {"Add": 2}),
    ],
)
def test_chains_of_one_shape_are_one_sum(lines: str, outputs: str, wanted: dict[str, int]) -> None:
    count, before, after = rewritten(chain(lines, outputs))
    assert kinds(after) == wanted
    assert count == wanted.get("Sum", 0)
    onnx.checker.check_model(after, full_check=True)
    actual = results(after)
    for name, array in results(before).items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["int64", "bfloat16", "float16"])
def test_integers_and_16_bits_stay(kind: str) -> None:
    text = chain("p = Add(a, b) y = Add(p, c)", f"{kind}[2,3] y", kind)
    assert kinds(rewritten(text)[2]) == {"Add": 2}


def test_a_sum_has_no_more_terms_than_a_kernel_takes() -> None:
    steps = ["s0 = Add(a, b)"]
    steps += [f"s{i} = Add(s{i - 1}, {n})" for i, n in enumerate(NAMES[2:], 1)]
    text = chain(" ".join(steps), f"float[2,3] s{len(steps) - 1}", count=len(NAMES))
    count, before, after = rewritten(text)
    assert count == 2
    assert [len(n.input) for n in after.graph.node] == [3, 8]
    (wanted,), (actual,) = results(before).values(), results(after).values()
    np.testing.assert_array_equal(actual, wanted)  # the order is the same


def test_distant_additions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    text = chain("p = Add(a, b) q = Exp(c) r = Exp(q) y = Add(p, r)")
    assert kinds(rewritten(text)[2]) == {"Sum": 1, "Exp": 2}
    monkeypatch.setattr(module, "_MAX_DISTANCE", 2)
    assert kinds(rewritten(text)[2]) == {"Add": 2, "Exp": 2}


class Branches(nn.Module):
    """Three layers that read one tensor, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return x + sum(torch.tanh(layer(x)) for layer in self.layers)


def test_only_targets_with_the_preference() -> None:
    model = from_torch(Branches(), (torch.randn(5, 4),))
    counts = {
        target: kinds(onnxtrain.vjp(model, target=target)).get("Sum", 0)
        for target in ("cpu", "cuda", "wasm", "webgpu", "portable")
    }
    assert counts.pop("cuda") > 0
    assert set(counts.values()) == {0}
