"""scatter_nd_per_element and scatter_add_as_matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import parser

import onnxtrain
from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.simplify import simplify
from onnxtrain.lowering.placement import nodes_off_gpu
from onnxtrain.optimize.scatter import scatter_add_as_matmul, scatter_nd_per_element

Rewrite = Callable[[ir.Model, OpBuilder], int]
RNG = np.random.default_rng(0)


def graph(data: str, indices: str, updates: str, kind: str = "add", start: str = "") -> str:
    reduction = f'<reduction = "{kind}">' if kind else ""
    return f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{data}] x, int64[{indices}] i, float[{updates}] u) => (float[{data}] y)
    <int64[{len(data.split(","))}] shape = {{{data.replace("n", "9")}}}> {{
        {start or "z = Neg(x)"}
        y = ScatterND {reduction} (z, i, u)
    }}"""


def rewritten(text: str, rewrite: Rewrite = scatter_nd_per_element) -> tuple[onnx.ModelProto, int]:
    model = ir.from_proto(parser.parse_model(text))
    infer_shapes(model.graph, 21)
    count = rewrite(model, OpBuilder(model.graph, "new/", target="cuda"))
    simplify(model)
    return ir.to_proto(model), count


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, feeds)[0])


def compare(text: str, i: np.ndarray, rewrite: Rewrite = scatter_nd_per_element) -> onnx.ModelProto:
    made, count = rewritten(text, rewrite)
    assert count == 1
    plain = parser.parse_model(text)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in plain.graph.input
    }
    feeds = {n: RNG.standard_normal(shapes[n]).astype(np.float32) for n in ("x", "u")}
    have, want = run(made, feeds | {"i": i}), run(plain, feeds | {"i": i})
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    assert not nodes_off_gpu(made, "cuda")
    return made


@pytest.mark.parametrize("kind", ["add", "mul", "max", "min"])
def test_rows(kind: str) -> None:
    i = np.array([[[0], [3], [3]], [[-1], [3], [-5]]])
    compare(graph("5, 4, 6", "2, 3, 1", "2, 3, 4, 6", kind), i)


def test_replaced_rows() -> None:
    compare(graph("5, 24", "3, 1", "3, 24", ""), np.array([[4], [-5], [2]]))


def test_several_coordinates() -> None:
    i = np.array([[0, 1, 2], [-1, -2, -3], [0, 1, 2], [1, 0, -1]])
    compare(graph("2, 3, 4, 20", "4, 3", "4, 20"), i)


def test_zeros_get_the_flat_shape() -> None:
    zeros = "z = ConstantOfShape(shape)"
    made = compare(graph("9, 32", "6, 1", "6, 32", start=zeros), np.array([[0]] * 3 + [[8]] * 3))
    maker = next(n for n in made.graph.node if n.op_type == "ConstantOfShape")
    assert next(n for n in made.graph.node if n.op_type == "ScatterND").input[0] == maker.output[0]


def test_small_tables_are_matmuls() -> None:
    text = graph("5, 2, 3", "2, 4, 1", "2, 4, 2, 3", start="z = ConstantOfShape(shape)")
    i = np.array([[[0], [4], [4], [-1]], [[-5], [0], [2], [2]]])
    made = compare(text, i, scatter_add_as_matmul)
    assert "ScatterND" not in {n.op_type for n in made.graph.node}


@pytest.mark.parametrize(
    "text",
    [
        graph("5, 3", "8, 1", "8, 3"),
        graph("5, 3", "8, 1", "8, 3", "mul", "z = ConstantOfShape(shape)"),
        graph("5, 3, 2", "8, 2", "8, 2", start="z = ConstantOfShape(shape)"),
        graph("5, 3", "4, 1", "4, 3", start="z = ConstantOfShape(shape)"),
        graph("2000, 3", "2100, 1", "2100, 3", start="z = ConstantOfShape(shape)"),
    ],
    ids=["not zeros", "not a sum", "two coordinates", "few indices", "a large table"],
)
def test_other_tables_are_not_matmuls(text: str) -> None:
    assert rewritten(text, scatter_add_as_matmul)[1] == 0


def test_many_elements_share_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T, "SCATTER_INDEX_ELEMENTS", 25)
    made = compare(graph("9, 32", "6, 1", "6, 32"), np.array([[0], [0], [1], [-9], [8], [-1]]))
    joined = next(n for n in made.graph.node if n.op_type == "Add")
    offsets = next(t for t in made.graph.initializer if t.name == joined.input[1])
    assert list(offsets.dims) == [4]
    monkeypatch.setattr(T, "SCATTER_INDEX_ELEMENTS", 11)
    assert rewritten(graph("9, 32", "6, 1", "6, 32"))[1] == 0


def test_indices_out_of_range_are_clipped() -> None:
    made, _ = rewritten(graph("3, 16", "4, 1", "4, 16"))
    feeds = {"x": np.zeros((3, 16), np.float32), "u": np.ones((4, 16), np.float32)}
    have = run(made, feeds | {"i": np.array([[3], [90], [-4], [1]])})
    np.testing.assert_array_equal(have, np.array([[1], [1], [2]]) * np.ones((3, 16)))


@pytest.mark.parametrize(
    "text",
    [
        graph("9, 4", "6, 1", "6, 4"),
        graph("n, 32", "6, 1", "6, 32", start="z = Neg(x)"),
        graph("9, 32", "6, 2", "6"),
        graph("9, 32", "0, 1", "0, 32"),
        graph("9, 32", "6, 1", "6, 32").replace("float", "int64"),
    ],
    ids=["short rows", "an open size", "no rows", "no indices", "integers"],
)
def test_other_scatters_stay(text: str) -> None:
    assert rewritten(text)[1] == 0


TABLES = """<ir_version: 10, opset_import: ["": 21]>
g (int64[3, 4] x, float[40, 32] words, float[6, 32] places, float[2, 32] sorts)
=> (float[3, 4, 32] y)
<int64[1, 6] ids = {0, 1, 2, 3, 4, 5}, int64[1] zero = {0}, int64[1] four = {4}, int64[1] one = {1},
 int64 five = {5}>
{
    at = Slice(ids, zero, four, one)
    late = Less(x, five)
    kind = Cast <to = 7> (late)
    a = Gather(words, x)
    b = Gather(places, at)
    c = Gather(sorts, kind)
    d = Add(a, b)
    e = Add(c, d)
    y = Tanh(e)
}"""


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_tables_against_torch(dtype: Any) -> None:
    text = TABLES if dtype == np.float32 else TABLES.replace("float", "double")
    names = ["words", "places", "sorts"]
    made = onnxtrain.vjp(parser.parse_model(text), wrt=names, target="cuda")
    scattered = [n for n in made.graph.node if n.op_type == "ScatterND"]
    assert len(scattered) == (1 if dtype == np.float32 else 2)
    tables = {n: RNG.standard_normal((r, 32)) for n, r in zip(names, (40, 6, 2), strict=True)}
    x, dy = np.array([[38, 0, 38, 2], [1, 1, 1, 1], [4, 5, 6, 0]]), RNG.standard_normal((3, 4, 32))
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {n: v.astype(dtype) for n, v in (tables | {"y_grad": dy}).items()} | {"x": x}
    have = session.run([f"{n}_grad" for n in names], feeds)
    leaves = [torch.tensor(tables[n], requires_grad=True) for n in names]
    words, places, sorts = leaves
    ids = torch.tensor(x)
    y = torch.tanh(words[ids] + places[:4][None] + sorts[(ids < 5).long()])
    want = torch.autograd.grad(y, leaves, torch.tensor(dy))
    tol = 1e-5 if dtype == np.float32 else 1e-12
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b.numpy(), rtol=tol, atol=tol)
