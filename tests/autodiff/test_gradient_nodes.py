"""Gradient, Adam, Adagrad and Momentum nodes of the ONNX standard, on stock onnxruntime."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from onnxtrain.errors import PrepareError, UndifferentiableError

HEADER = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>'
TRAINING = "ai.onnx.preview.training."
RNG = np.random.default_rng(0)


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + text.replace("Gradient", TRAINING + "Gradient"))


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [y.name for y in session.get_outputs()]
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    return dict(zip(names, session.run(None, arrays), strict=True))


def node_cases() -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own case files overflow on purpose
        from onnx.backend.test.loader import load_model_tests

        tests = load_model_tests(kind="node")
    return [t for t in tests if t.model.opset_import[0].domain == "ai.onnx.preview.training"]


def test_node_cases_of_the_training_domain_run_after_expansion() -> None:
    cases = node_cases()
    assert len(cases) == 7
    for case in cases:
        model = onnxtrain.expand_gradients(case.model)
        assert {n.domain for n in model.graph.node} == {""}
        for given, expected in case.data_sets:
            inputs, outputs = (
                [np.asarray(_array(a)) for a in arrays] for arrays in (given, expected)
            )
            feeds = dict(zip((x.name for x in case.model.graph.input), inputs, strict=True))
            results = run(model, **feeds)
            for name, want in zip((y.name for y in case.model.graph.output), outputs, strict=True):
                np.testing.assert_allclose(
                    results[name], want, rtol=case.rtol, atol=case.atol, err_msg=case.name
                )


def _array(tensor: onnx.TensorProto | np.ndarray) -> np.ndarray:
    return ir.from_proto(tensor).numpy() if isinstance(tensor, onnx.TensorProto) else tensor


ADAM = """
adam (float R, int64 T, double[2] X, double[2] G, double[2] V, double[2] H)
  => (double[2] x, double[2] v, double[2] h) {{
  x, v, h = ai.onnx.preview.training.Adam <{}> (R, T, X, G, V, H)
}}"""


@pytest.mark.parametrize("t", [0, 3])
def test_adam_follows_the_pseudo_code_of_the_standard(t: int) -> None:
    a, b, e, n, post = 0.5, 0.75, 0.125, 0.25, 0.0625  # exact in float32
    text = f"alpha = {a}, beta = {b}, epsilon = {e}, norm_coefficient = {n}"
    text += f", norm_coefficient_post = {post}"
    model = onnxtrain.expand_gradients(model_of(ADAM.format(text)))
    x, g, v, h = RNG.normal(size=(4, 2))
    h = h**2
    got = run(model, R=np.float32(0.5), T=np.int64(t), X=x, G=g, V=v, H=h)
    g = n * x + g
    v = a * v + (1 - a) * g
    h = b * h + (1 - b) * g * g
    rate = 0.5 * np.sqrt(1 - b**t) / (1 - a**t) if t > 0 else 0.5
    want = (1 - post) * (x - rate * v / (np.sqrt(h) + e))
    np.testing.assert_allclose(got["x"], want, rtol=1e-12)
    np.testing.assert_allclose(got["v"], v, rtol=1e-12)
    np.testing.assert_allclose(got["h"], h, rtol=1e-12)


def test_momentum_ignores_beta_in_the_first_iteration() -> None:
    text = """
    m (float R, int64 T, float[1] X, float[1] G, float[1] V) => (float[1] x, float[1] v) {
      x, v = ai.onnx.preview.training.Momentum
        <alpha = 0.5, beta = 0.25, mode = "standard", norm_coefficient = 0.0> (R, T, X, G, V)
    }"""
    model = onnxtrain.expand_gradients(model_of(text))
    one = np.ones(1, np.float32)
    feeds = {"R": np.float32(1), "X": one, "G": one, "V": one}
    assert run(model, T=np.int64(0), **feeds)["v"] == 1.5
    assert run(model, T=np.int64(1), **feeds)["v"] == 0.75


def test_inputs_that_are_not_groups_are_refused() -> None:
    text = """
    a (float R, int64 T, float[1] X, float[1] G) => (float[1] x, float[1] h) {
      x, h = ai.onnx.preview.training.Adagrad (R, T, X, G)
    }"""
    with pytest.raises(PrepareError, match="groups of 3 tensors"):
        onnxtrain.expand_gradients(model_of(text))


NET = """
net (double[4,3] x, double[3,5] w, double[5] b, double[4,5] t, double[3,5] v)
  => (double loss, double[3,5] dw, double[5] db, double[3,5] hv) {
  h = MatMul (x, w)
  z = Add (h, b)
  a = Tanh (z)
  e = Sub (a, t)
  s = Mul (e, e)
  loss = ReduceMean <keepdims = 0> (s)
  dw, db = Gradient <xs = ["w", "b"], zs = ["x", "t"], y = "loss"> (w, b, x, t)
  d = Mul (dw, v)
  p = ReduceSum <keepdims = 0> (d)
  hv = Gradient <xs = ["w"], zs = ["b", "x", "t", "v"], y = "p"> (w, b, x, t, v)
}"""


def test_nested_gradient_is_a_hessian_vector_product() -> None:
    shapes = {"x": (4, 3), "w": (3, 5), "b": (5,), "t": (4, 5), "v": (3, 5)}
    feeds = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    model = onnxtrain.expand_gradients(model_of(NET))
    onnx.checker.check_model(model, full_check=True)
    got = run(model, **feeds)

    x, w, b, t, v = (torch.tensor(feeds[name]) for name in "xwbtv")

    def loss(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((torch.tanh(x @ w + b) - t) ** 2).mean()

    w.requires_grad_()
    b.requires_grad_()
    dw, db = torch.autograd.grad(loss(w, b), (w, b), create_graph=True)
    (hv,) = torch.autograd.grad((dw * v).sum(), w)
    for name, want in {"loss": loss(w, b), "dw": dw, "db": db, "hv": hv}.items():
        np.testing.assert_allclose(got[name], want.detach().numpy(), rtol=1e-12, err_msg=name)


def test_third_derivative() -> None:
    text = """
    g (double[3] x) => (double[3] d3) {
      y = Exp (x)
      z = Mul (y, x)
      d1 = Gradient <xs = ["x"], y = "z"> (x)
      d2 = Gradient <xs = ["x"], y = "d1"> (x)
      d3 = Gradient <xs = ["x"], y = "d2"> (x)
    }"""
    x = RNG.normal(size=3)
    got = run(onnxtrain.expand_gradients(model_of(text)), x=x)
    np.testing.assert_allclose(got["d3"], (x + 3) * np.exp(x), rtol=1e-12)


def test_gradient_at_other_values() -> None:
    """The inputs of the node are the point, whatever the named tensors hold."""
    text = """
    g (double[3] x, double[3] z, double[3] point, double[3] scale) => (double[3] y, double[3] dx) {
      s = Sin (x)
      y = Mul (s, z)
      dx = Gradient <xs = ["x"], zs = ["z"], y = "y"> (point, scale)
    }"""
    x, z, point, scale = RNG.normal(size=(4, 3))
    model = onnxtrain.expand_gradients(model_of(text))
    got = run(model, x=x, z=z, point=point, scale=scale)
    np.testing.assert_allclose(got["y"], np.sin(x) * z, rtol=1e-12)
    np.testing.assert_allclose(got["dx"], np.cos(point) * scale, rtol=1e-12)


def test_gradient_with_respect_to_an_intermediate_value() -> None:
    """An alias of the value has readers of its own, which the gradient must not count."""
    text = """
    g (double[3] x) => (double[3] h, double[3] dh, double[3] dx) {
      r = Exp (x)
      h = Identity (r)
      a = Mul (h, h)
      b = Sin (r)
      y = Mul (a, b)
      dh = Gradient <xs = ["h"], zs = ["b"], y = "y"> (h, b)
      dx = Gradient <xs = ["x"], y = "y"> (x)
    }"""
    x = RNG.normal(size=3)
    got = run(onnxtrain.expand_gradients(model_of(text)), x=x)
    r = np.exp(x)
    np.testing.assert_allclose(got["h"], r, rtol=1e-12)
    np.testing.assert_allclose(got["dh"], 2 * r * np.sin(r), rtol=1e-12)
    np.testing.assert_allclose(got["dx"], (2 * r * np.sin(r) + r * r * np.cos(r)) * r, rtol=1e-12)


def test_unused_and_independent_outputs() -> None:
    text = """
    g (float[3] x, float[2] unread, float[3] w) => (float[2] dunread, float[3] dw) {
      y = Mul (x, w)
      , dunread, dw = Gradient <xs = ["x", "unread", "w"], y = "y"> (x, unread, w)
    }"""
    x, w = RNG.normal(size=(2, 3)).astype(np.float32)
    got = run(onnxtrain.expand_gradients(model_of(text)), x=x, w=w, unread=x[:2])
    np.testing.assert_array_equal(got["dunread"], np.zeros(2))
    np.testing.assert_array_equal(got["dw"], x)


def test_gradient_node_inside_a_function() -> None:
    text = """
    g (float[3] x) => (float[3] dx) { dx = acme.slope (x) }
    <domain: "acme", opset_import: ["": 18, "ai.onnx.preview.training": 1]>
    slope (q) => (dq) {
      y = Mul (q, q)
      dq = Gradient <xs = ["q"], y = "y"> (q)
    }"""
    header = HEADER.replace("]>", ', "acme": 1]>')
    text = text.replace("Gradient", TRAINING + "Gradient")
    model = onnx.parser.parse_model(header + text)
    x = RNG.normal(size=3).astype(np.float32)
    np.testing.assert_array_equal(run(onnxtrain.expand_gradients(model), x=x)["dx"], 2 * x)


def test_every_entry_point_reads_gradient_nodes() -> None:
    """A loss with a gradient penalty: its second derivative trains."""
    text = """
    g (float[n,3] x) => (float loss) <float[3,1] w = {0.5, -1.0, 2.0}> {
      h = MatMul (x, w)
      y = Tanh (h)
      dx = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)
      s = Mul (dx, dx)
      loss = ReduceSum <keepdims = 0> (s)
    }"""
    model = model_of(text)
    report = onnxtrain.explain(model)
    assert report.differentiable
    assert any("gradient of 'y' with respect to 'x'" in line for line in report.repairs)
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    w = torch.tensor([[0.5], [-1.0], [2.0]], requires_grad=True)
    tx = torch.tensor(x, requires_grad=True)
    (dx,) = torch.autograd.grad(torch.tanh(tx @ w).sum(), tx, create_graph=True)
    (dw,) = torch.autograd.grad((dx**2).sum(), w)
    got = run(onnxtrain.grad(model), x=x, w=w.detach().numpy())
    np.testing.assert_allclose(got["w_grad"], dw.numpy(), rtol=1e-4)


BAD = {
    "is not a value of this graph": '{ y = Exp (x) dx = Gradient <xs = ["w"], y = "y"> (x) }',
    "a name is twice": '{ y = Exp (x) dx = Gradient <xs = ["x"], zs = ["x"], y = "y"> (x, x) }',
    "2 names in xs and zs, 1 inputs": "{ y = Exp (x) z = Exp (x) "
    'dx = Gradient <xs = ["x"], zs = ["z"], y = "y"> (x) }',
    "'y' is computed from 'x'": "{ y = Exp (x) z = Mul (y, x) "
    'dx = Gradient <xs = ["x", "y"], y = "z"> (x, y) }',
    "needs its own result": '{ dx = Gradient <xs = ["x"], y = "y"> (x) y = Mul (x, dx) }',
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_gradient_nodes_are_refused(message: str) -> None:
    model = onnx.parser.parse_model(
        HEADER
        + f"g (float[3] x) => (float[3] dx) {BAD[message]}".replace(
            "Gradient", TRAINING + "Gradient"
        )
    )
    with pytest.raises(PrepareError, match=message):
        onnxtrain.expand_gradients(model)


@pytest.mark.parametrize("name", ["x", "y"])
def test_gradient_inside_a_branch_is_refused(name: str) -> None:
    text = f"""
    g (float[3] x, bool c) => (float[3] z) {{
      z = If (c) <
        then_branch = t () => (float[3] dx) {{
          y = Mul (x, x)
          dx = Gradient <xs = ["{name}"], y = "y"> ({name})
        }},
        else_branch = e () => (float[3] n) {{ n = Neg (x) }}
      >
    }}"""
    with pytest.raises(PrepareError, match="'dx': Gradient inside a body of If"):
        onnxtrain.expand_gradients(model_of(text))


def test_random_function_at_another_point_is_refused() -> None:
    text = """
    g (float[3] x, float[3] p) => (float[3] dx) {
      r = RandomUniformLike (x)
      y = Mul (x, r)
      dx = Gradient <xs = ["x"], y = "y"> (p)
    }"""
    with pytest.raises(UndifferentiableError, match="would draw other random numbers"):
        onnxtrain.expand_gradients(model_of(text))


def test_operator_without_derivative_is_named() -> None:
    text = """
    g (float[3] x) => (float[3] dx) {
      y = acme.Swirl (x)
      dx = Gradient <xs = ["x"], y = "y"> (x)
    }"""
    header = HEADER.replace("]>", ', "acme": 1]>')
    model = onnx.parser.parse_model(header + text.replace("Gradient", TRAINING + "Gradient"))
    with pytest.raises(onnxtrain.errors.OnnxTrainError, match="acme"):
        onnxtrain.expand_gradients(model)
