"""flatten_batch_dims: fewer nodes, equal values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.targets import find

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
WEIGHTS = "float[6,4] a, float[6] b, float[4,6] c, float[4] s"
BLOCK = """
    at = Transpose<perm=[1,0]>(a)
    ct = Transpose<perm=[1,0]>(c)
    h = MatMul(x, at)
    hb = Add(h, b)
    t = Tanh(hb)
    u = MatMul(t, ct)
    v = Add(u, x)
    n = LayerNormalization<axis=-1>(v, s)
    h2 = MatMul(n, at)
    g2 = Sigmoid(h2)
    t2 = Mul(g2, h2)
    u2 = MatMul(t2, ct)
    w2 = Add(u2, v)
    h3 = MatMul(w2, at)
    k3 = Add(h3, b)
    u3 = MatMul(k3, ct)
    m = Mul(u3, n)
"""
HEADS = """
    h4 = Reshape(m, heads)
    p = Transpose<perm=[0,2,1,3]>(h4)
    e = Softmax<axis=-1>(p)
    q = Transpose<perm=[0,2,1,3]>(e)
    r = Reshape(q, whole)
    rt = MatMul(r, at)
    y = MatMul(rt, ct)
"""


def model_of(dims: str, tail: str, outputs: str, more: str = "") -> onnx.ModelProto:
    text = f"g (float[{dims}] x, {WEIGHTS}) => ({outputs}) <{more}> {{{BLOCK}{tail}}}"
    return parser.parse_model(HEAD + text.replace("<>", ""))


def gradients(model: onnx.ModelProto, *, joined: bool) -> tuple[list[str], dict[str, np.ndarray]]:
    target = find("cpu")
    target = target if joined else target.without("flatten-batch-dims")
    made = onnxtrain.vjp(model, wrt=["a", "b", "c", "s"], target=target)
    rng = np.random.default_rng(1)
    session: Any = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {}
    for x in session.get_inputs():
        dims = [d if isinstance(d, int) else {"B": 2, "S": 5}[d] for d in x.shape]
        feeds[x.name] = rng.standard_normal(dims).astype(np.float32)
    names = [y.name for y in session.get_outputs()]
    results = dict(zip(names, session.run(names, feeds), strict=True))
    return [n.op_type for n in made.graph.node], results


@pytest.mark.parametrize("dims", ["B,S,4", "B,5,4", "2,5,4"])
@pytest.mark.parametrize(
    ("tail", "outputs", "more"),
    [
        ("y = Mul(m, m)", "float[B,S,4] y", ""),
        ("y = ReduceMean<keepdims=0>(m)", "float y", ""),
        (HEADS, "float[B,S,4] y", "int64[4] heads = {0,0,2,2}, int64[3] whole = {0,0,4}"),
        ("y = Mul(m, m) z = Softmax<axis=1>(m)", "float[B,S,4] y, float[B,S,4] z", ""),
    ],
    ids=["rows", "mean", "heads", "another axis"],
)
def test_same_values_in_fewer_nodes(dims: str, tail: str, outputs: str, more: str) -> None:
    sizes = dims.split(",")
    for symbol, size in zip("BS", sizes, strict=False):
        outputs = outputs.replace(f"{symbol},", f"{size},")
    model = model_of(dims, tail, outputs, more)
    before, want = gradients(model, joined=False)
    after, have = gradients(model, joined=True)
    assert len(after) < len(before)
    assert after.count("Reshape") < before.count("Reshape")
    assert list(have) == list(want)
    for name, array in want.items():
        np.testing.assert_allclose(have[name], array, rtol=2e-5, atol=2e-6, err_msg=name)


def test_operators_that_need_batch_and_sequence_stay() -> None:
    text = f"""{HEAD} g (float[B,S,4] x, float[1,S,4] p, float[4,4] w) => (float[B,S,4] y) {{
        a = Add(x, p)
        y = MatMul(a, w)
    }}"""
    made = onnxtrain.vjp(parser.parse_model(text), wrt=["w"])
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in made.graph.value_info
    }
    (added,) = (n for n in made.graph.node if n.op_type == "Add")
    assert dims[added.output[0]] == ["B", "S", 4]


def test_outputs_keep_their_names_and_shapes() -> None:
    model = model_of("B,S,4", "y = Mul(m, m)", "float[B,S,4] y")
    made = onnxtrain.vjp(model, wrt=["a", "c"])
    y = made.graph.output[0]
    assert y.name == "y"
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["B", "S", 4]


def test_a_shape_that_only_orders_execution() -> None:
    """The smaller of a size and zero says nothing of axes; the size itself does."""
    waits = "n0 = Shape<start=0, end=1>(v) z = Min(n0, zero)"
    for tail, rank in ((waits, 2), (waits + " k = Identity(n0)", 3)):
        outputs = "float[B,S,4] y, int64[1] z" + (", int64[1] k" if rank == 3 else "")
        model = model_of("B,S,4", f"y = Mul(m, m) {tail}", outputs, "int64[1] zero = {0}")
        made = onnxtrain.vjp(model, wrt=["a", "c"])
        dims = {v.name: len(v.type.tensor_type.shape.dim) for v in made.graph.value_info}
        asked = {n.input[0] for n in made.graph.node if n.op_type == "Shape"} & set(dims)
        assert {dims[name] for name in asked} == {rank}
