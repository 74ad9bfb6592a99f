"""vmap, Jacobians, Hessians and their products against torch in float64; CasADi's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ad
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
    outside = [n.op_type for n in model.graph.node]
    (scan,) = (n for n in model.graph.node if n.op_type == "Scan")
    inside = [n.op_type for n in scan.attribute[0].g.node]
    assert "Tanh" in outside
    assert "Tanh" not in inside


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
