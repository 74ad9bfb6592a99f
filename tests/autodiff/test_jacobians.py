"""vmap, Jacobians, Hessians and their products against torch in float64; CasADi's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ad
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.autograd import functional

import onnxtrain
from onnxtrain.errors import PrepareError, UndifferentiableError

TEXT = """<ir_version: 8, opset_import: ["": 18]>
g (double[n,3] x, double[3,2] w, double[2] b) => (double[n,2] y, double loss) {
  h = MatMul (x, w)  z = Add (h, b)  y = Tanh (z)
  q = Mul (y, y)  c = Mul (q, y)  loss = ReduceSum <keepdims = 0> (c)
}"""
MODEL = onnx.parser.parse_model(TEXT)
RNG = np.random.default_rng(0)
X, W, B = RNG.normal(size=(4, 3)), RNG.normal(size=(3, 2)), RNG.normal(size=2)
FEEDS = {"x": X, "w": W, "b": B}
Arrays = dict[str, np.ndarray]


def run(model: onnx.ModelProto | Path, **feeds: np.ndarray) -> Arrays:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source)
    results = (np.asarray(r) for r in session.run(None, feeds))
    return dict(zip((y.name for y in session.get_outputs()), results, strict=True))


def y_of(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


def loss_of(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (y_of(x, w, b) ** 3).sum()


def point() -> tuple[Tensor, ...]:
    return tuple(torch.tensor(a) for a in FEEDS.values())


def close(got: np.ndarray, expected: Tensor) -> None:
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_jacobian() -> None:
    got = run(onnxtrain.jacobian(MODEL, ["x", "b"], "y"), **FEEDS)
    dx, _, db = functional.jacobian(y_of, point())  # type: ignore[misc]
    close(got["x_jacobian"], dx)
    close(got["b_jacobian"], db)
    close(got["y"], y_of(*point()))


def test_jacobian_of_a_scalar_is_the_gradient() -> None:
    got = run(onnxtrain.jacobian(MODEL, "w", "loss"), **FEEDS)["w_jacobian"]
    np.testing.assert_allclose(got, run(onnxtrain.grad(MODEL, "w", "loss"), **FEEDS)["w_grad"])


def test_hessian_blocks() -> None:
    model = onnxtrain.hessian(MODEL, ["w", "b"], "loss")
    onnx.checker.check_model(model, full_check=True)
    got, expected = run(model, **FEEDS), functional.hessian(loss_of, point())
    for i, a in enumerate("wb", 1):
        for k, b in enumerate("wb", 1):
            close(got[f"{a}_{b}_hessian"], expected[i][k])  # type: ignore[index]


def test_hvp_is_the_product_with_the_hessian() -> None:
    v, u = RNG.normal(size=(3, 2)), RNG.normal(size=2)
    model = onnxtrain.hvp(MODEL, ["w", "b"], "loss")
    got = run(model, **FEEDS, w_tangent=v, b_tangent=u)
    tangents = (torch.zeros(4, 3, dtype=torch.float64), torch.tensor(v), torch.tensor(u))
    _, products = functional.hvp(loss_of, point(), tangents)
    close(got["w_hvp"], products[1])
    close(got["b_hvp"], products[2])
    np.testing.assert_allclose(
        got["w_grad"], run(onnxtrain.grad(MODEL, "w", "loss"), **FEEDS)["w_grad"]
    )


def test_gradient_of_each_example() -> None:
    model = onnxtrain.vmap(onnxtrain.grad(MODEL, "w", "loss"), "x")
    got = run(model, x=X[:, None], w=W, b=B)["w_grad"]
    for i in range(len(X)):
        each = {"x": X[i : i + 1], "w": W, "b": B}
        expected = run(onnxtrain.grad(MODEL, "w", "loss"), **each)["w_grad"]
        np.testing.assert_allclose(got[i], expected, rtol=1e-12)


def test_jvp_along_many_tangents() -> None:
    tangents = RNG.normal(size=(3, 2, 5))
    model = onnxtrain.vmap(onnxtrain.jvp(MODEL, "w", "y"), "w_tangent", axis=2)
    got = run(model, **FEEDS, w_tangent=tangents)
    assert got["y"].shape == (4, 2)  # does not depend on the tangent: computed once
    _, jacobian, _ = functional.jacobian(y_of, point())  # type: ignore[misc]
    close(got["y_tangent"], torch.einsum("nkij,ijv->vnk", jacobian, torch.tensor(tangents)))


def test_all_inputs_are_mapped_by_default() -> None:
    model = onnxtrain.vmap(MODEL)
    got = run(model, **{n: np.stack([a, 2 * a]) for n, a in FEEDS.items()})
    for i in (0, 1):
        expected = run(MODEL, **{n: (i + 1) * a for n, a in FEEDS.items()})
        for name in ("y", "loss"):
            np.testing.assert_allclose(got[name][i], expected[name], rtol=1e-12)


def test_what_does_not_depend_on_the_axis_runs_once() -> None:
    model = onnxtrain.vmap(onnxtrain.vjp(MODEL, "w", "y"), "y_grad")
    assert [n.op_type for n in model.graph.node].count("Tanh") == 1
    shapes = onnx.shape_inference.infer_shapes(model).graph.value_info
    (tanh,) = (n for n in model.graph.node if n.op_type == "Tanh")
    (y,) = (v for v in (*shapes, *model.graph.output) if v.name == tanh.output[0])
    assert len(y.type.tensor_type.shape.dim) == 2
    looped = onnxtrain.vmap(LOOPED, "v")
    outside = [n.op_type for n in looped.graph.node]
    (scan,) = (n for n in looped.graph.node if n.op_type == "Scan")
    inside = [n.op_type for n in scan.attribute[0].g.node]
    assert "Tanh" in outside
    assert "Tanh" not in inside


# Convolutions with several weights have no batching rule.
LOOPED = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
g (float[1,1,4,4] x, float[1,1,2,2] v) => (float[1,1,3,3] y) { t = Tanh (x)  y = Conv (t, v) }""")

BATCHED = {
    "broadcast": "(float[2,3] x, float[3] v) => (float[2,3] y) { a = Add(x, v) y = Max(v, a, x) }",
    "higher rank": "(float[3] x, float[2,3] v) => (float[2,3] y) { y = Mul(x, v) }",
    "where": """(float[2,3] x, float[2,3] v) => (float[2,3] y) {
        c = Greater(x, v) y = Where(c, x, v) }""",
    "clip": """(float[2,3] x, float[3] v) => (float[2,3] y) <float l = {-0.5}> {
        c = Clip(x, l) y = Add(c, v) }""",
    "matmul": "(float[2,3] x, float[3,4] v) => (float[2,4] y) { y = MatMul(x, v) }",
    "matmul of stacks": "(float[2,3] x, float[4,3,2] v) => (float[4,2,2] y) { y = MatMul(x, v) }",
    "vector and matrix": "(float[3] x, float[3,4] v) => (float[4] y) { y = MatMul(x, v) }",
    "matrix and vector": "(float[2,3] x, float[3] v) => (float[2] y) { y = MatMul(x, v) }",
    "vectors": "(float[3] x, float[3] v) => (float y) { y = MatMul(x, v) }",
    "gemm": """(float[3,2] x, float[4,3] v) => (float[2,4] y) <float[4] c = {1, 2, 3, 4}> {
        y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, v, c) }""",
    "transpose": """(float[2,3] x, float[3,2] v) => (float[3,2] y) {
        t = Transpose(x) y = Add(t, v) }""",
    "reduce": """(float[2,3] x, float[2,1] v) => (float[2,1] y) <int64[1] a = {-1}> {
        r = ReduceMean(x, a) y = Mul(r, v) }""",
    "reduce all": """(float[2,3] x, float[3] v) => (float y) {
        m = Mul(x, v) y = ReduceSum<keepdims = 0>(m) }""",
    "softmax": """(float[2,3] x, float[3] v) => (float[2,3] y) {
        a = Add(x, v) y = Softmax<axis = 0>(a) }""",
    "argmax": """(float[2,3] x, float[3] v) => (int64[2,1] y) {
        a = Mul(x, v) y = ArgMax<axis = 1>(a) }""",
    "cumsum": """(float[2,3] x, float[3] v) => (float[2,3] y) <int64 a = {1}> {
        m = Mul(x, v) y = CumSum(m, a) }""",
    "axes": """(float[2,3] x, float[2,1,3] v) => (float[2,3] y) <int64[1] a = {1}> {
        u = Unsqueeze(x, a) m = Mul(u, v) y = Squeeze(m, a) }""",
    "reshape": """(float[2,3] x, float[3,2] v) => (float[3,2] y) <int64[2] s = {-1, 2}> {
        r = Reshape(x, s) y = Add(r, v) }""",
    "own shape": """(float[n,3] x, float[n,3] v) => (float[n,3] y) <int64[1] f = {-1}> {
        r = Reshape(x, f) s = Shape(x) b = Reshape(r, s) y = Add(b, v) }""",
    "expand": """(float[3] x, float[3] v) => (float[2,3] y) <int64[2] s = {2, 3}> {
        a = Add(x, v) y = Expand(a, s) }""",
    "tile": """(float[2,3] x, float[3] v) => (float[4,3] y) <int64[2] r = {2, 1}> {
        a = Add(x, v) y = Tile(a, r) }""",
    "size": """(float[n,3] x, float[3] v) => (float[n,3] y) {
        s = Size(x) c = Cast<to = 1>(s) d = Div(x, c) y = Add(d, v) }""",
    "concat": "(float[2,3] x, float[2,3] v) => (float[4,3] y) { y = Concat<axis = 0>(x, v) }",
    "split": """(float[2,4] x, float[2,2] v) => (float[2,2] y) {
        a, b = Split<axis = -1, num_outputs = 2>(x) m = Mul(a, b) y = Add(m, v) }""",
    "slice": """(float[3,4] x, float[1,2] v) => (float[1,2] y) <int64[2] s = {1, 0},
        int64[2] e = {2, 2}> { p = Slice(x, s, e) y = Add(p, v) }""",
    "gather": """(float[3,4] x, float[3,2] v) => (float[3,2] y) <int64[2] i = {3, 0}> {
        g = Gather<axis = 1>(x, i) y = Add(g, v) }""",
    "one-hot": """(float[3,4] x, float[3,5] v) => (float[3,5] y) <int64 d = {5},
        float[2] o = {0, 1}> {
        i = ArgMax<axis = 1, keepdims = 0>(x) h = OneHot(i, d, o) y = Add(h, v) }""",
    "lookup": """(float[2,4] x, float[4,3] v) => (float[2,3] y) {
        i = ArgMax<axis = 1, keepdims = 0>(x) y = Gather(v, i) }""",
    "gather elements": """(float[2,4] x, float[2,1] v) => (float[2,1] y) {
        i = ArgMax<axis = 1>(x) g = GatherElements<axis = 1>(x, i) y = Add(g, v) }""",
    "scatter": """(float[3,2] x, float[1,2] v) => (float[3,2] y) <int64[1,1] i = {1}> {
        y = ScatterND(x, i, v) }""",
    "pad": """(float[2,3] x, float[3,4] v) => (float[3,4] y) <int64[4] p = {0, 1, 1, 0}> {
        q = Pad(x, p) y = Add(q, v) }""",
    "convolution": """(float[2,1,4,4] x, float[2,3,2,2] v) => (float[2,3,2,2] y)
        <float[3,1,3,3] w> { c = Conv(x, w) y = Add(c, v) }""",
    "pooling": """(float[2,1,4,4] x, float[2,1,2,2] v) => (float[2,1,2,2] y) {
        c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = Add(c, v) }""",
    "normalization": """(float[2,3] x, float[2,3] v) => (float[2,3] y) <float[3] s = {1, 2, 3}> {
        a = Add(x, v) y = LayerNormalization(a, s) }""",
}


@pytest.mark.parametrize("mapped", [["x"], ["v"], ["x", "v"]], ids="".join)
@pytest.mark.parametrize("name", BATCHED)
def test_batching_rules(name: str, mapped: list[str]) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g ' + BATCHED[name])
    rng = np.random.default_rng(1)
    for value in [v for v in model.graph.value_info if v.name == "w"]:
        model.graph.value_info.remove(value)
        w = rng.standard_normal((3, 1, 3, 3)).astype(np.float32)
        model.graph.initializer.append(ir.to_proto(ir.tensor(w, name="w")))
    feeds = {}
    for x in model.graph.input:
        sizes = [d.dim_value or 2 for d in x.type.tensor_type.shape.dim]
        batch = [5] if x.name in mapped else []
        feeds[x.name] = rng.standard_normal([*batch, *sizes]).astype(np.float32)
    batched = onnxtrain.vmap(model, mapped)
    assert "Scan" not in [n.op_type for n in batched.graph.node]
    (got,) = run(batched, **feeds).values()
    for i in range(5):
        each = {n: a[i] if n in mapped else a for n, a in feeds.items()}
        (expected,) = run(model, **each).values()
        np.testing.assert_allclose(got[i], expected, rtol=1e-5, atol=1e-6)


def test_an_operator_without_a_batching_rule_loops() -> None:
    x = RNG.normal(size=(1, 1, 4, 4)).astype(np.float32)
    v = RNG.normal(size=(5, 1, 1, 2, 2)).astype(np.float32)
    batched = onnxtrain.vmap(LOOPED, "v")
    assert "Scan" in [n.op_type for n in batched.graph.node]
    got = run(batched, x=x, v=v)["y"]
    for i in range(5):
        np.testing.assert_allclose(got[i], run(LOOPED, x=x, v=v[i])["y"], rtol=1e-6)


def test_errors() -> None:
    with pytest.raises(PrepareError, match="'xx'"):
        onnxtrain.vmap(MODEL, "xx")
    with pytest.raises(UndifferentiableError, match=r"use onnxtrain\.jacobian"):
        onnxtrain.hessian(MODEL, "w", "y")


SHAPES = {"vector": "[3]", "matrix": "[3,2]", "scalar": "", "column": "[3,1]"}


@pytest.mark.parametrize("shape", SHAPES)
def test_casadi_files_equal_those_of_onnx_ad(shape: str, tmp_path: Path) -> None:
    """onnx-ad writes what CasADi reads: the same names, shapes and values."""
    dims = SHAPES[shape]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (double{dims} x, double{dims} k) => '
        f"(double{dims} y) {{ s = Sin (x)  p = Mul (s, k)  y = Exp (p) }}"
    )
    paths = onnxtrain.save_casadi(model, tmp_path / "f.onnx")
    assert [p.name for p in paths] == ["f.onnx", "adj_f.onnx", "fwd_f.onnx", "fwd_adj_f.onnx"]
    adjoint = onnx_ad.reverse(model)
    theirs = [model, adjoint, onnx_ad.forward(model), onnx_ad.forward(adjoint)]
    rng = np.random.default_rng(0)
    for path, other in zip(paths, theirs, strict=True):
        ours = onnx.load(path)
        names = {x.name for x in other.graph.input}
        assert {x.name for x in ours.graph.input} == names
        feeds = {}
        for x in other.graph.input:
            sizes = [d.dim_value or d.dim_param for d in x.type.tensor_type.shape.dim]
            width = 2 if shape == "matrix" else 1
            seeds = width * (6 if "nfwd_nadj" in str(sizes) else 3 if "nadj" in str(sizes) else 2)
            feeds[x.name] = rng.normal(size=[d if isinstance(d, int) else seeds for d in sizes])
        got, expected = run(path, **feeds), run(other, **feeds)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-10, err_msg=f"{path.name} {name}")
