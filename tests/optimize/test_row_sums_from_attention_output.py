"""row_sums_from_attention_output: the output of attention replaces its weights."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import parser

import onnxtrain

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
INPUTS = "float[b, 2, s, 4] q, float[b, 2, 4, s] k, float[b, 2, s, 4] v"
ROWS, WIDTH = 7, 4


def gradients(text: str) -> tuple[list[list[int | str]], list[np.ndarray]]:
    """Return the shapes that are summed over their last axis, and the gradients of q, k and v."""
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["q", "k", "v"], target="cuda")
    shapes = {
        x.name: [d.dim_value or d.dim_param for d in x.type.tensor_type.shape.dim]
        for x in (*made.graph.value_info, *made.graph.input, *made.graph.output)
    }
    products = {n.output[0]: n for n in made.graph.node if n.op_type == "Mul"}
    sums = [n.input[0] for n in made.graph.node if n.op_type == "ReduceSum"]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {x.name: given(x.name) for x in session.get_inputs()}
    return [shapes[n] for n in sums if n in products], [
        np.asarray(g) for g in session.run(None, feeds)[1:]
    ]


def given(name: str) -> np.ndarray:
    """Return the values of an input."""
    shapes = {"k": (3, 2, WIDTH, ROWS), "m": (3, 1, ROWS, ROWS), "o": (3, 1, ROWS, 1)}
    shapes["y_grad"] = (3, ROWS, 2, WIDTH) if TURNED else (3, 2, ROWS, WIDTH)
    rng = np.random.default_rng(sum(map(ord, name)))
    values = rng.standard_normal(shapes.get(name, (3, 2, ROWS, WIDTH))).astype(np.float32)
    return values > 0 if name == "o" else values


TURNED = False


def reference(guarded: bool) -> list[np.ndarray]:
    """Return what torch gives, in float64."""
    q, k, v = (torch.tensor(given(n), dtype=torch.float64, requires_grad=True) for n in "qkv")
    y = torch.softmax(q @ k, -1) @ v
    if guarded:
        y = torch.where(torch.tensor(given("o")), y, 0.0)
    dy = torch.tensor(given("y_grad"), dtype=torch.float64)
    y = y.transpose(1, 2) if TURNED else y
    return [g.numpy() for g in torch.autograd.grad(y, (q, k, v), dy)]


@pytest.mark.parametrize("turned", [False, True], ids=["heads", "rows"])
@pytest.mark.parametrize("guarded", [False, True], ids=["open", "guarded"])
def test_rows_of_the_output_are_summed(
    turned: bool, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TURNED", turned)
    last = "t" if turned or guarded else "y"
    out = "float[b, s, 2, 4] y" if turned else "float[b, 2, s, 4] y"
    text = f"""g ({INPUTS}{", bool[b, 1, s, 1] o" if guarded else ""}) => ({out}) {{
        w = MatMul(q, k)
        p = Softmax(w)
        {last} = MatMul(p, v)
        {"zero = Constant <value_float = 0.0> ()" if guarded else ""}
        {("u" if turned else "y") + " = Where(o, t, zero)" if guarded else ""}
        {f"y = Transpose <perm = [0, 2, 1, 3]> ({'u' if guarded else 't'})" if turned else ""}
    }}"""
    shapes, results = gradients(text)
    assert shapes
    assert [s[-1] for s in shapes] == [WIDTH] * len(shapes), shapes
    for have, want in zip(results, reference(guarded), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        (INPUTS, "w = MatMul(q, k) p = Softmax(w) t = MatMul(p, v) y = Mul(t, p)"),
        (INPUTS, "w = MatMul(q, k) p = Softmax(w) e = Exp(p) y = MatMul(e, v)"),
    ],
    ids=["weights read twice", "weights changed"],
)
def test_other_sums_stay(inputs: str, body: str) -> None:
    made = parser.parse_model(
        f"{HEAD} g ({inputs.replace('s', '4')}) => (float[b, 2, 4, 4] y) {{ {body} }}"
    )
    wide = onnxtrain.vjp(made, wrt=["q"], target="cuda")
    assert not any(n.name.startswith("cuda/ReduceSum") for n in wide.graph.node)


def test_short_sequences_stay() -> None:
    text = """g (float[b, 2, 3, 4] q, float[b, 2, 4, 3] k, float[b, 2, 3, 4] v)
        => (float[b, 2, 3, 4] y) { w = MatMul(q, k) p = Softmax(w) y = MatMul(p, v) }"""
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["q"], target="cuda")
    assert not any(n.name.startswith("cuda/ReduceSum") for n in made.graph.node)
