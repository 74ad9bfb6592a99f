"""Rewrites of inference simplifiers that `prepare` and `simplify` must not apply.

Every entry is harmless for inference and breaks training: parameters folded, merged
or dropped, random nodes merged or removed.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.graph.io import load
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer import prepare
from tests.cases.evaluate import stock

# hazard: (graph, operators that stay, parameters that stay)
HAZARDS: dict[str, tuple[str, dict[str, int], list[str]]] = {
    "two random merged": (
        """(float[4] x) => (float[4] y) { a = RandomUniformLike(x) b = RandomUniformLike(x) c =
            Sub(a, b) y = Add(x, c) }""",
        {"RandomUniformLike": 2},
        [],
    ),
    "two random with one seed merged": (
        """(float[4] x) => (float[4] y) { a = RandomNormalLike<seed=1.0>(x) b =
            RandomNormalLike<seed=1.0>(x) c = Sub(a, b) y = Add(x, c) }""",
        {"RandomNormalLike": 2},
        [],
    ),
    "two Bernoulli merged": (
        """(float[4] x) => (float[4] y) { p = Sigmoid(x) a = Bernoulli(p) b = Bernoulli(p) c =
            Sub(a, b) y = Add(x, c) }""",
        {"Bernoulli": 2},
        [],
    ),
    "two dropouts merged": (
        """(float[4] x) => (float[4] y) <float r={0.5}, bool t={1}> { a = Dropout(x, r, t) b =
            Dropout(x, r, t) y = Sub(a, b) }""",
        {"Dropout": 2},
        [],
    ),
    "dropout in training mode dropped": (
        """(float[4] x) => (float[4] y) <float r={0.5}, bool t={1}> { y = Dropout(x, r, t) }""",
        {"Dropout": 1},
        [],
    ),
    "dropout whose mode is an input dropped": (
        """(float[4] x, bool t) => (float[4] y) <float r={0.5}> { y = Dropout(x, r, t) }""",
        {"Dropout": 1},
        [],
    ),
    "parameters of equal value merged": (
        """(float[4] x) => (float[4] y) <float[4] p={1.0,1.0,1.0,1.0}, float[4]
            q={1.0,1.0,1.0,1.0}>{ a = Mul(x, p) y = Mul(a, q) }""",
        {"Mul": 2},
        ["p", "q"],
    ),
    "non-trivial parameters of equal value merged": (
        """(float[2] x) => (float[2] y) <float[2,2] p={1.0,2.0,3.0,4.0}, float[2,2]
            q={1.0,2.0,3.0,4.0}>{ a = MatMul(x, p) b = MatMul(x, q) y = Mul(a, b) }""",
        {"MatMul": 2, "Mul": 1},
        ["p", "q"],
    ),
    "BatchNormalization in training mode fused": (
        """(float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2] s={1.0,1.0}, float[2]
            b={0.0,0.0}, float[2] m={0.0,0.0}, float[2] v={1.0,1.0}, float[2,2,1,1]
            w={1.0,2.0,3.0,4.0}> { a = Conv(x, w) y, rm, rv =
            BatchNormalization<training_mode=1>(a, s, b, m, v) }""",
        {"Conv": 1, "BatchNormalization": 1},
        ["s", "b", "w"],
    ),
    "BatchNormalization in evaluation mode fused": (
        """(float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2] s={1.0,1.0}, float[2]
            b={0.0,0.0}, float[2] m={0.0,0.0}, float[2] v={1.0,1.0}, float[2,2,1,1]
            w={1.0,2.0,3.0,4.0}> { a = Conv(x, w) y = BatchNormalization(a, s, b, m, v) }""",
        {"Conv": 1, "BatchNormalization": 1},
        ["s", "b", "w"],
    ),
    "transposed weight folded": (
        """(float[2] x) => (float[2] y) <float[2,2] w={1.0,2.0,3.0,4.0}>{ t =
            Transpose<perm=[1,0]>(w) y = MatMul(x, t) }""",
        {"Transpose": 1, "MatMul": 1},
        ["w"],
    ),
    "weight norm folded": (
        """(float[2] x) => (float[2] y) <float[2,2] v={1.0,2.0,3.0,4.0}, float[2,1]
            g={1.0,1.0}>{ n = ReduceL2<keepdims=1>(v) u = Div(v, n) w = Mul(u, g) y = MatMul(x,
            w) }""",
        {"ReduceL2": 1, "Div": 1, "Mul": 1, "MatMul": 1},
        ["v", "g"],
    ),
    "scale and shift after Conv fused": (
        """(float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2,1,1] s={2.0,3.0}, float[2,1,1]
            b={1.0,2.0}, float[2,2,1,1] w={1.0,2.0,3.0,4.0}> { a = Conv(x, w) c = Mul(a, s) y =
            Add(c, b) }""",
        {"Conv": 1, "Mul": 1, "Add": 1},
        ["s", "b", "w"],
    ),
    "bias after MatMul fused": (
        """(float[2,2] x) => (float[2,2] y) <float[2,2] w={1.0,2.0,3.0,4.0}, float[2]
            b={0.0,0.0}>{ a = MatMul(x, w) y = Add(a, b) }""",
        {"MatMul": 1, "Add": 1},
        ["w", "b"],
    ),
    "times one and plus zero dropped": (
        """(float[2] x) => (float[2] y) <float[2] s={1.0,1.0}, float[2] b={0.0,0.0}>{ a =
            Mul(x, s) y = Add(a, b) }""",
        {"Mul": 1, "Add": 1},
        ["s", "b"],
    ),
    "zero bias of Conv dropped": (
        """(float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2] b={0.0,0.0}, float[2,2,1,1]
            w={1.0,2.0,3.0,4.0}> { y = Conv(x, w, b) }""",
        {"Conv": 1},
        ["b", "w"],
    ),
    "scalar parameter folded": (
        """(float[2] x) => (float[2] y) <float logit_scale={2.0}> { e = Exp(logit_scale) y =
            Mul(x, e) }""",
        {"Exp": 1, "Mul": 1},
        ["logit_scale"],
    ),
    "reshaped and sliced parameter folded": (
        """(float[2] x) => (float[2] y) <float[1,4] w={1.0,2.0,3.0,4.0}, int64[1] i={0},
            int64[1] j={2}, int64[1] k={4}> { r = Reshape(w, k) s = Slice(r, i, j) y = Mul(x, s)
            }""",
        {"Reshape": 1, "Slice": 1, "Mul": 1},
        ["w"],
    ),
    "expanded parameter folded": (
        """(float[2] x) => (float[3,2] y) <float[2] w={1.0,2.0}, int64[2] n={3,2}> { s =
            Expand(w, n) y = Mul(x, s) }""",
        {"Expand": 1, "Mul": 1},
        ["w"],
    ),
}


def parse(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {graph}')


@pytest.mark.parametrize("hazard", HAZARDS)
def test_hazard(hazard: str) -> None:
    graph, operators, parameters = HAZARDS[hazard]
    model = parse(graph)
    work = simplify(prepare(load(model)).model)
    counts = Counter(n.op_type for n in work.graph)
    assert {op: counts[op] for op in operators} == operators
    values = onnxtrain.parameters(model) if parameters else {}
    assert list(values) == parameters
    given = {t.name: t for t in model.graph.initializer}
    for name, array in values.items():
        assert list(array.shape) == list(given[name].dims)
    finalize(work)


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if HAZARDS[h][2]])
def test_every_parameter_gets_its_own_gradient(hazard: str) -> None:
    graph, operators, parameters = HAZARDS[hazard]
    vjp = onnxtrain.vjp(parse(graph))
    counts = Counter(n.op_type for n in vjp.graph.node)
    assert all(counts[op] >= n for op, n in operators.items())
    assert [v.name for v in vjp.graph.input] == ["x", *parameters, "y_grad"]
    assert [v.name for v in vjp.graph.output] == ["y", *(f"{p}_grad" for p in parameters)]


def test_outputs_keep_names_and_order() -> None:
    model = parse("""(float[2] x, float[2] z) => (float[2] b, float[2] a, float[2] c, float[2] d)
        { h = Neg(x)  a = Identity(h)  b = Identity(h)  c = Identity(x)  d = Neg(x) }""")
    x, z = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    for made in (finalize(simplify(prepare(load(model)).model)), onnxtrain.vjp(model, ["x", "z"])):
        assert [v.name for v in made.graph.input][:2] == ["x", "z"]
        assert [v.name for v in made.graph.output][:4] == ["b", "a", "c", "d"]
        rest = [np.ones(2)] * (len(made.graph.input) - 2)
        for ours, theirs in zip(stock(made)([x, z, *rest]), stock(model)([x, z]), strict=False):
            np.testing.assert_array_equal(ours, theirs)


def test_training_step_stays_correct() -> None:
    """Differentiate and simplify a graph with parameters as inputs, twice."""
    model = parse("""(float[N,2] x, float[2,2] w, float[2] b) => (float loss)
        { a = MatMul(x, w)  h = Add(a, b)  s = Mul(h, h)  loss = ReduceMean<keepdims=0>(s) }""")
    once = onnxtrain.grad(model, ["w", "b"])
    again = finalize(simplify(prepare(load(once)).model))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s) for s in ((3, 2), (2, 2), (2,))]
    assert [v.name for v in again.graph.output] == ["loss", "w_grad", "b_grad"]
    for ours, theirs in zip(stock(again)(values), stock(once)(values), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
