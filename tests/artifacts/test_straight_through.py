"""Straight-through gradients of quantizers equal those of torch's fake quantization."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import onnxtrain
from onnxtrain.autodiff.gradients import GradientModel, load_normalized
from onnxtrain.autodiff.selection import select_wrt
from onnxtrain.errors import UndifferentiableError

RNG = np.random.default_rng(0)
HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g'


def model_of(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    for name, array in constants.items():
        model.graph.initializer.append(ir.to_proto(ir.Tensor(np.asarray(array), name=name)))
    return model


def gradients(model: onnx.ModelProto, wrt: list[str], feeds: dict[str, np.ndarray], dy: np.ndarray):
    """Return the output and the straight-through gradients."""
    work = load_normalized(model, straight_through=True)
    made = GradientModel(work)
    values = select_wrt(work, wrt)
    made.lift(values)
    y = work.graph.outputs[0]
    grads = made.differentiate({y: made.input_like("dy", y)}, values)
    for x in values:
        made.output(f"{x.name}_grad", grads[x], x)
    session = onnxruntime.InferenceSession(made.finish().SerializeToString())
    arrays = {t.name: ir.from_proto(t).numpy() for t in model.graph.initializer}
    fed = {**arrays, **feeds, "dy": dy}
    known = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in fed.items() if k in known})


QDQ = """(float[4, 6] x) => (float[4, 6] y) {
    q = QuantizeLinear<axis = AXIS>(x, s, z)
    y = DequantizeLinear<axis = AXIS>(q, s, z) }"""
X = (2 * RNG.standard_normal((4, 6))).astype(np.float32)
DY = RNG.standard_normal((4, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.uint8, 0, 255), (np.int8, -128, 127), (np.int16, -32768, 32767)]
)
def test_per_tensor_scale_equals_torch(dtype, low: int, high: int) -> None:
    scale, zero = np.float32(0.01), dtype(7)
    y, dx = gradients(model_of(QDQ.replace("AXIS", "1"), s=scale, z=zero), ["x"], {"x": X}, DY)
    x = torch.tensor(X, requires_grad=True)
    want = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), low, high)
    want.backward(torch.tensor(DY))
    np.testing.assert_allclose(y, want.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(dx, x.grad.numpy(), atol=1e-6)
    if dtype != np.int16:
        assert 0 < (dx == 0).sum() < dx.size  # some are clipped


@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel_scale_equals_torch(axis: int) -> None:
    count = X.shape[axis]
    scale = np.linspace(0.005, 0.02, count).astype(np.float32)
    zero = np.arange(count).astype(np.int8)
    text = QDQ.replace("AXIS", str(axis))
    y, dx = gradients(model_of(text, s=scale, z=zero), ["x"], {"x": X}, DY)
    x = torch.tensor(X, requires_grad=True)
    want = torch.fake_quantize_per_channel_affine(
        x, torch.tensor(scale), torch.tensor(zero, dtype=torch.int32), axis, -128, 127
    )
    want.backward(torch.tensor(DY))
    np.testing.assert_allclose(y, want.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(dx, x.grad.numpy(), atol=1e-6)


def test_trainable_scale_equals_torch() -> None:
    scale, zero = np.float32(0.01), np.int8(7)
    model = model_of(QDQ.replace("AXIS", "1"), s=scale, z=zero)
    _, dx, ds = gradients(model, ["x", "s"], {"x": X}, DY)
    x = torch.tensor(X, requires_grad=True)
    s = torch.tensor([float(scale)], requires_grad=True)
    z = torch.tensor([float(zero)], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -128, 127, 1.0)
    y.backward(torch.tensor(DY))
    np.testing.assert_allclose(dx, x.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(ds, s.grad.numpy()[0], rtol=1e-4)


W = RNG.integers(-100, 100, (6, 3)).astype(np.int8)
IMAGE = RNG.standard_normal((2, 3, 5, 5)).astype(np.float32)
KERNEL = RNG.integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)
S = np.float32
FORMS = {
    "dynamic product": (
        """(float[4, 6] x) => (float[4, 3] y) {
        q, a, z = DynamicQuantizeLinear(x)
        n = MatMulInteger(q, w, z)
        f = Cast<to = 1>(n)
        u = Mul(a, v)
        y = Mul(f, u) }""",
        {"w": W, "v": S(0.02)},
        X,
        (4, 3),
        W.astype(np.float32) * 0.02,
    ),
    "product": (
        """(float[4, 6] x) => (float[4, 3] y) {
        q = QuantizeLinear(x, s, z)
        n = QLinearMatMul(q, s, z, w, v, o, t, z)
        y = DequantizeLinear(n, t, z) }""",
        {"s": S(0.1), "z": np.uint8(128), "w": W, "v": S(0.02), "o": np.int8(3), "t": S(0.3)},
        X,
        (4, 3),
        (W.astype(np.float32) - 3) * 0.02,
    ),
    "fused dynamic product": (
        """(float[4, 6] x) => (float[4, 3] y) {
        y = com.microsoft.DynamicQuantizeMatMul(x, w, v) }""",
        {"w": W, "v": S(0.02)},
        X,
        (4, 3),
        W.astype(np.float32) * 0.02,
    ),
    "integer product to floats": (
        """(float[4, 6] x) => (float[4, 3] y) {
        q = QuantizeLinear(x, s, z)
        y = com.microsoft.MatMulIntegerToFloat(q, w, s, v, z) }""",
        {"s": S(0.1), "z": np.uint8(128), "w": W, "v": S(0.02)},
        X,
        (4, 3),
        W.astype(np.float32) * 0.02,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_integer_matmuls(name: str) -> None:
    """Without clipping, the gradient equals that of the float matmul."""
    text, constants, x, shape, weight = FORMS[name]
    model = model_of(text, **constants)
    dy = RNG.standard_normal(shape).astype(np.float32)
    y, dx = gradients(model, ["x"], {"x": x}, dy)
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    step = float(constants.get("t", 1e-4)) * 1.01
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=step)
    np.testing.assert_allclose(dx, dy @ weight.T, rtol=1e-4, atol=1e-4)


def test_integer_convolution() -> None:
    text = """(float[2, 3, 5, 5] x) => (float[2, 4, 3, 3] y) {
        q = QuantizeLinear(x, s, z)
        n = QLinearConv(q, s, z, w, v, o, t, z, b)
        y = DequantizeLinear(n, t, z) }"""
    scales = np.linspace(0.01, 0.02, 4).astype(np.float32)
    constants = {
        "s": S(0.05),
        "z": np.uint8(128),
        "w": KERNEL,
        "v": scales,
        "o": np.zeros(4, np.int8),
        "t": S(0.3),
        "b": np.arange(4, dtype=np.int32) * 100,
    }
    model = model_of(text, **constants)
    dy = RNG.standard_normal((2, 4, 3, 3)).astype(np.float32)
    y, dx = gradients(model, ["x"], {"x": IMAGE}, dy)
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": IMAGE})[0]
    np.testing.assert_allclose(y, want, atol=0.31)
    weight = torch.tensor(KERNEL.astype(np.float32) * scales[:, None, None, None])
    assert abs(want).max() < 0.9 * float(constants["t"]) * 127  # nothing is clipped
    backward = torch.nn.functional.conv_transpose2d(torch.tensor(dy), weight)
    np.testing.assert_allclose(dx, backward.numpy(), rtol=1e-3, atol=1e-3)


TRAINED = """(float[n, 6] x) => (float[n, 3] y) {
    h = MatMul(x, w)
    q = QuantizeLinear(h, s, z)
    d = DequantizeLinear(q, s, z)
    y = MatMul(d, v) }"""
CONSTANTS = {
    "w": RNG.standard_normal((6, 5)).astype(np.float32),
    "s": S(0.05),
    "z": np.int8(0),
    "v": RNG.standard_normal((5, 3)).astype(np.float32),
}


def test_without_the_option_the_error_names_it() -> None:
    model = model_of(TRAINED, **CONSTANTS)
    with pytest.raises(UndifferentiableError, match=r"build\(\.\.\., straight_through=True\)"):
        onnxtrain.build(model, loss="mse", optimizer="sgd", train="w")


def test_a_model_with_quantizers_trains() -> None:
    model = model_of(TRAINED, **CONSTANTS)
    built = onnxtrain.build(
        model, loss="mse", optimizer="adamw:lr=0.01", train=["w", "v"], straight_through=True
    )
    assert built.manifest.options["straight_through"] is True
    trainer = onnxtrain.Trainer(built)
    x = RNG.standard_normal((16, 6)).astype(np.float32)
    target = (x[:, :3] * 0.5).astype(np.float32)
    losses = [trainer.step(x=x, target=target).loss for _ in range(30)]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.7 * losses[0]
