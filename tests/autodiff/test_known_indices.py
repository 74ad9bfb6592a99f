"""Gradients of tables by indices that are known before a run."""

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
    """The graph, and the table's gradient for given slices."""
    model = parser.parse_model(HEAD.format(body=body, table=table, rows=rows))
    made = onnxtrain.vjp(model, wrt=["table"], target="cuda")
    x = np.array([[1, 3, 3, 6], [2, 2, 2, 2], [0, 7, 5, 1]])
    feeds = {"x": x, "table": np.zeros((table, WIDTH), np.float32), "y_grad": slices()}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    names = {i.name for i in session.get_inputs()}
    outputs = session.run(None, {n: v for n, v in feeds.items() if n in names})
    return made, np.asarray(outputs[1])


def slices() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)


def by_torch(indices: np.ndarray, table: int) -> np.ndarray:
    t = torch.zeros(table, WIDTH, dtype=torch.float64, requires_grad=True)
    read = t[torch.tensor(indices)].expand(ROWS, LENGTH, WIDTH)
    (g,) = torch.autograd.grad(read, t, torch.tensor(slices(), dtype=torch.float64))
    return g.numpy()


def kinds(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node}


def check(body: str, indices: np.ndarray, table: int, rows: str = "3") -> onnx.ModelProto:
    made, have = gradient(body, table, rows)
    np.testing.assert_allclose(have, by_torch(indices, table), rtol=1e-5, atol=1e-6)
    return made


@pytest.mark.parametrize("rows", ["3", "n"])
def test_positions_repeated_for_each_row_are_a_part_of_the_table(rows: str) -> None:
    body = f"{POSITIONS} {REPEATED} y = Gather(table, all)"
    made = check(body, np.arange(LENGTH)[None], 9, rows)
    assert "ScatterND" not in kinds(made)


@pytest.mark.parametrize("rows", ["3", "n"])
def test_types_that_are_all_the_same_are_one_row(rows: str) -> None:
    body = f"{POSITIONS.replace('part', 'at')} part = GatherElements <axis = 1> (kinds, at) "
    made = check(f"{body} {REPEATED} y = Gather(table, all)", np.zeros((1, 1), int), 2, rows)
    assert "ScatterND" not in kinds(made)


def test_indices_of_the_data_repeated_are_added_up_first() -> None:
    body = """first = Slice(x, zero, one, zero) all = Expand(first, both) y = Gather(table, all)"""
    made = check(body, np.array([[1, 3, 3, 6]]), 8)
    scattered = next(n for n in made.graph.node if n.op_type == "ScatterND")
    makers = {n.output[0]: n for n in made.graph.node}
    rows = makers[scattered.input[2]]
    while rows.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
        rows = makers[rows.input[0]]
    assert rows.op_type == "ReduceSum"


def test_indices_of_the_data_are_scattered() -> None:
    x = np.array([[1, 3, 3, 6], [2, 2, 2, 2], [0, 7, 5, 1]])
    assert "ScatterND" in kinds(check("y = Gather(table, x)", x, 40))


def test_many_types_are_known_too() -> None:
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
    listed = ", ".join(["1"] * 64)
    model = parser.parse_model(text.replace("kinds = {}", f"kinds = {{{listed}}}"))
    made = onnxtrain.vjp(model, wrt=["table"], target="cpu")
    assert not kinds(made) & {"ScatterND", "MatMul"}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    dy = np.random.default_rng(1).standard_normal((3, 40, 5)).astype(np.float32)
    feeds = {"x": np.zeros(3, np.int64), "table": np.zeros((2, 5), np.float32), "y_grad": dy}
    names = {i.name for i in session.get_inputs()}
    have = session.run(None, {n: v for n, v in feeds.items() if n in names})[1]
    want = np.stack([np.zeros(5), dy.sum((0, 1))])
    np.testing.assert_allclose(np.asarray(have), want, rtol=1e-5, atol=1e-5)
