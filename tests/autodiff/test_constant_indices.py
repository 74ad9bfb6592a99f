"""Gradients of embedding tables whose indices are constants."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser

import onnxtrain

ROWS, LENGTH, WIDTH = 3, 4, 5

HEAD = """<ir_version: 10, opset_import: ["": 21]>
g (int64[{rows}, 4] x, float[{table}, 5] table) => (float[{rows}, 4, 5] y)
<int64[1, 8] ids = {{0, 1, 2, 3, 4, 5, 6, 7}}, int64[1, 8] kinds = {{0, 0, 0, 0, 0, 0, 0, 0}},
 int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] one = {{1}}, int64[2] both = {{3, 4}}>
{{ {body} }}"""

POSITIONS = "part = Slice(ids, zero, four, one)"
REPEATED = "n = Shape <end = 1> (x) size = Concat <axis = 0> (n, four) all = Expand(part, size)"


def gradient(body: str, table: int, rows: str = "3") -> tuple[onnx.ModelProto, np.ndarray]:
    """Return the gradient graph and the table's gradient."""
    model = parser.parse_model(HEAD.format(body=body, table=table, rows=rows))
    vjp = onnxtrain.vjp(model, wrt=["table"], target="cuda")
    x = np.array([[1, 3, 3, 6], [2, 2, 2, 2], [0, 7, 5, 1]])
    feeds = {"x": x, "table": np.zeros((table, WIDTH), np.float32), "y_grad": upstream()}
    session = onnxruntime.InferenceSession(vjp.SerializeToString())
    names = {i.name for i in session.get_inputs()}
    outputs = session.run(None, {n: v for n, v in feeds.items() if n in names})
    return vjp, np.asarray(outputs[1])


def upstream() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)


def torch_gradient(indices: np.ndarray, table: int) -> np.ndarray:
    t = torch.zeros(table, WIDTH, dtype=torch.float64, requires_grad=True)
    read = t[torch.tensor(indices)].expand(ROWS, LENGTH, WIDTH)
    (g,) = torch.autograd.grad(read, t, torch.tensor(upstream(), dtype=torch.float64))
    return g.numpy()


def kinds(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node}


def check(body: str, indices: np.ndarray, table: int, rows: str = "3") -> onnx.ModelProto:
    vjp, actual = gradient(body, table, rows)
    np.testing.assert_allclose(actual, torch_gradient(indices, table), rtol=1e-5, atol=1e-6)
    return vjp


@pytest.mark.parametrize("rows", ["3", "n"])
def test_gradient_of_position_embeddings_has_no_scatter(rows: str) -> None:
    body = f"{POSITIONS} {REPEATED} y = Gather(table, all)"
    vjp = check(body, np.arange(LENGTH)[None], 9, rows)
    assert "ScatterND" not in kinds(vjp)


@pytest.mark.parametrize("rows", ["3", "n"])
def test_gradient_of_a_constant_token_type_has_no_scatter(rows: str) -> None:
    body = f"{POSITIONS.replace('part', 'at')} part = GatherElements <axis = 1> (kinds, at) "
    vjp = check(f"{body} {REPEATED} y = Gather(table, all)", np.zeros((1, 1), int), 2, rows)
    assert "ScatterND" not in kinds(vjp)


def test_gradients_of_repeated_indices_are_summed_before_the_scatter() -> None:
    body = """first = Slice(x, zero, one, zero) all = Expand(first, both) y = Gather(table, all)"""
    vjp = check(body, np.array([[1, 3, 3, 6]]), 8)
    scattered = next(n for n in vjp.graph.node if n.op_type == "ScatterND")
    producers = {n.output[0]: n for n in vjp.graph.node}
    rows = producers[scattered.input[2]]
    while rows.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
        rows = producers[rows.input[0]]
    assert rows.op_type == "ReduceSum"


def test_gradient_of_data_dependent_indices_is_scattered() -> None:
    x = np.array([[1, 3, 3, 6], [2, 2, 2, 2], [0, 7, 5, 1]])
    assert "ScatterND" in kinds(check("y = Gather(table, x)", x, 40))


def test_gradient_of_computed_constant_indices_has_no_scatter() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (int64[n] x, float[2, 5] table) => (float[n, 40, 5] y)
    <int64[1, 64] kinds = {}, int64[1] zero = {0}, int64[1] forty = {40}, int64[1] one = {1}>
    {
        first = Constant <value_int = 0> ()
        last = Constant <value_int = 64> ()
        step = Constant <value_int = 1> ()
        line = Range(first, last, step)
        ids = Unsqueeze(line, zero)
        part = Slice(ids, zero, forty, one)
        some = GatherElements <axis = 1> (kinds, part)
        n = Shape(x)
        size = Concat <axis = 0> (n, forty)
        all = Expand(some, size)
        y = Gather(table, all)
    }"""
    ones = ", ".join(["1"] * 64)
    model = parser.parse_model(text.replace("kinds = {}", f"kinds = {{{ones}}}"))
    vjp = onnxtrain.vjp(model, wrt=["table"], target="cpu")
    assert not kinds(vjp) & {"ScatterND", "MatMul"}
    session = onnxruntime.InferenceSession(vjp.SerializeToString())
    dy = np.random.default_rng(1).standard_normal((3, 40, 5)).astype(np.float32)
    feeds = {"x": np.zeros(3, np.int64), "table": np.zeros((2, 5), np.float32), "y_grad": dy}
    names = {i.name for i in session.get_inputs()}
    actual = session.run(None, {n: v for n, v in feeds.items() if n in names})[1]
    expected = np.stack([np.zeros(5), dy.sum((0, 1))])
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-5)
