"""What `simplify` removes and what it keeps; results stay the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.simplify import simplify
from tests.cases.evaluate import stock

INTS = "<int64[2] s = {6, 4}, int64[3] t = {3, 2, 4}, int64[3] z = {0, 2, 4}, int64[1] a = {0},"
INTS += " int64[3] one = {1, 1, 1}, float two = {2.0}, float unit = {1.0}>"

# name: (nodes, operators afterwards)
GONE = {
    "reshape-to-the-same": ("r = Reshape(x, w)  y = Neg(r)", "Neg"),
    "reshape-of-reshape": ("r = Reshape(x, s)  q = Reshape(r, t)  y = Neg(q)", "Reshape Neg"),
    "there-and-back": ("r = Reshape(x, s)  q = Reshape(r, w)  y = Neg(q)", "Neg"),
    "squeeze-of-unsqueeze": ("u = Unsqueeze(x, a)  q = Squeeze(u, a)  y = Neg(q)", "Neg"),
    "transpose-twice": (
        "r = Transpose<perm=[1,2,0]>(x)  q = Transpose<perm=[2,0,1]>(r)  y = Neg(q)",
        "Neg",
    ),
    "transposes-joined": (
        "r = Transpose<perm=[1,2,0]>(x)  q = Transpose<perm=[1,0,2]>(r)  y = Neg(q)",
        "Transpose Neg",
    ),
    "reversed-twice": ("r = Transpose(x)  q = Transpose(r)  y = Neg(q)", "Neg"),
    "identity-perm": ("r = Transpose<perm=[0,1,2]>(x)  y = Neg(r)", "Neg"),
    "cast-to-the-same": ("r = Cast<to=1>(x)  y = Neg(r)", "Neg"),
    "expand-to-the-same": ("r = Expand(x, one)  y = Neg(r)", "Neg"),
    "expand-before-a-sum": ("r = Expand(two, w)  y = Add(x, r)", "Add"),
    "expand-before-where": (
        "c = Less(x, two)  r = Expand(two, w)  y = Where(c, x, r)",
        "Less Where",
    ),
    "concat-of-one": ("r = Concat<axis=0>(x)  y = Neg(r)", "Neg"),
    "negated-twice": ("p = Neg(x)  q = Neg(p)  y = Exp(q)", "Exp"),
    "minus-negated": ("e = Exp(x)  p = Neg(e)  y = Sub(x, p)", "Exp Add"),
    "plus-negated": ("e = Exp(x)  p = Neg(e)  y = Add(p, x)", "Exp Sub"),
    "computed-twice": ("p = Exp(x)  q = Exp(x)  y = Mul(p, q)", "Exp Mul"),
    "computed-twice-deep": (
        "p = Exp(x)  q = Exp(x)  r = Neg(p)  v = Neg(q)  y = Mul(r, v)",
        "Exp Neg Mul",
    ),
    "dead": ("p = Exp(x)  y = Neg(x)", "Neg"),
}
KEPT = {
    "zero-copies-the-middle": "r = Reshape(x, s)  q = Reshape(r, z2)  y = Neg(q)",
    "two-outputs-of-one-value": "y = Neg(x)  o = Neg(x)",
    "expand-that-gives-the-shape": "r = Expand(two, w)  y = Mul(r, two)",
    "negated-and-used": "e = Exp(x)  p = Neg(e)  q = Sub(x, p)  y = Mul(q, p)",
    "times-one-of-the-user": "r = Mul(x, unit)  y = Neg(r)",
    "different-attributes": "p = Transpose<perm=[0,2,1]>(x)  q = Transpose<perm=[2,1,0]>(x)"
    "  f = Shape(p)  g2 = Reshape(q, f)  y = Add(p, g2)",
    "random": "p = RandomUniformLike(x)  q = RandomUniformLike(x)  r = Sub(p, q)  y = Add(x, r)",
}


def build(nodes: str, outputs: str = "float[a,b,c] y") -> onnx.ModelProto:
    constants = INTS.replace("<", "<int64[3] w = {2, 3, 4}, int64[3] z2 = {0, 2, 2}, ", 1)
    text = f"g (float[2,3,4] x) => ({outputs}) {constants} {{ {nodes} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for i, name in enumerate(("a", "b", "c")):  # a rank, and no more, is known of the outputs
        for value in model.graph.output:
            value.type.tensor_type.shape.dim[i].dim_param = f"{value.name}_{name}"
    return model


def simplified(model: onnx.ModelProto) -> onnx.ModelProto:
    work = ir.from_proto(model)
    infer_shapes(work.graph, 21)
    return finalize(simplify(work))


def kinds(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


@pytest.mark.parametrize("name", GONE)
def test_removed(name: str) -> None:
    nodes, expected = GONE[name]
    model = build(nodes)
    made = simplified(model)
    assert kinds(made) == expected.split()
    np.testing.assert_array_equal(stock(made)([X])[0], stock(model)([X])[0])


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    outputs = "float[a,b,c] y, float[a,b,c] o" if "o = " in KEPT[name] else "float[a,b,c] y"
    model = build(KEPT[name], outputs)
    made = simplified(model)
    assert kinds(made) == kinds(model)
    if name != "random":
        for ours, theirs in zip(stock(made)([X]), stock(model)([X]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def own_graph() -> tuple[OpBuilder, ir.Value]:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 4]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g")
    return OpBuilder(graph), x


def finished(op: OpBuilder, y: ir.Value) -> onnx.ModelProto:
    op.graph.outputs.append(y)
    return finalize(simplify(ir.Model(op.graph, ir_version=10)))


def test_generated_identity_operands_are_removed() -> None:
    op, x = own_graph()
    y = op.Sub(op.Add(op.Div(op.Mul(1.0, x), 1.0), 0.0), 0.0)
    assert kinds(finished(op, op.Neg(y))) == ["Neg"]


def test_broadcasting_operands_stay() -> None:
    op, x = own_graph()
    row = op.ReduceSum(x, [0], keepdims=1)
    wide = op.Mul(row, op.const(np.ones((3, 4), np.float32)))
    assert kinds(finished(op, op.Neg(wide))) == ["ReduceSum", "Mul", "Neg"]


def test_transposes_merge_into_gemm() -> None:
    op, x = own_graph()
    w = op.const(np.arange(12, dtype=np.float32).reshape(3, 4))
    y = op.Gemm(x, op.Transpose(w, perm=[1, 0]))
    made = finished(op, op.Neg(y))
    assert kinds(made) == ["Gemm", "Neg"]
    (result,) = stock(made)([np.ones((2, 4))])
    np.testing.assert_array_equal(result, -np.ones((2, 4)) @ w.const_value.numpy().T)


def test_bodies_are_simplified_too() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (bool c, float[2] x) => (float[2] y) { y = If (c) <
            then_branch = p () => (float[2] a) {
                k = Exp(x)  l = Exp(x)  m = Exp(k)  a = Mul(k, l) },
            else_branch = q () => (float[2] b) { b = Neg(x) }> }""")
    made = simplified(model)
    branch = made.graph.node[0].attribute[0].g
    assert [n.op_type for n in branch.node] == ["Exp", "Mul"]


def test_values_read_only_by_a_dead_body_are_dead() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (bool c, float[2] x) => (float[2] y) { h = Exp(x)  d = If (c) <
            then_branch = p () => (float[2] a) { a = Mul(h, h) },
            else_branch = q () => (float[2] b) { b = Neg(h) }>
            y = Neg(x) }""")
    assert kinds(simplified(model)) == ["Neg"]


def test_nodes_that_lack_an_output_are_not_merged() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[3,1,2] x, float[1,8,2] w, float[1,8,2] r) => (float[3,1,1,2] y, float[1,1,2] h)
        { , , p = LSTM<hidden_size=2>(x, w, r)  y, , q = LSTM<hidden_size=2>(x, w, r)
          h = Sub(p, q) }""")
    assert kinds(simplified(model)) == ["LSTM", "LSTM", "Sub"]


@pytest.mark.parametrize(
    ("have", "want", "sizes"),
    [
        (("b", "s", 96), ("b", "s", 12, 8), [0, 0, 12, 8]),
        (("b*s", 96), ("b", "s", 96), None),
        (("b", 6), ("b", 2, 3), [0, 2, 3]),
        (("n", "m"), ("m", "n"), None),
        (("n", 4), (4, "n"), [4, -1]),
        (("n",), (0, "n"), None),
    ],
)
def test_reshape_to_constant_sizes(have, want, sizes) -> None:
    op, _ = own_graph()
    x, like = (op.input(n, ir.DataType.FLOAT, dims) for n, dims in (("p", have), ("q", want)))
    y = op.reshape_like(x, like)
    assert S.dims_of(y) == want
    given = S.constant_of(y.producer().inputs[1])
    assert (None if given is None else given.tolist()) == sizes


def test_finalize_rejects_an_invalid_model() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.Node("", "Relu", [x], [ir.AttrInt64("slope", 1)], num_outputs=1, name="r")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    with pytest.raises(
        OnnxTrainError, match="the result is not a valid ONNX model: Unrecognized attribute: slope"
    ):
        finalize(ir.Model(graph, ir_version=10))
