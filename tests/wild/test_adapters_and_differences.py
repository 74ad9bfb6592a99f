"""Tools that check third-party files: limits of differences, adapters, values before sigmoids."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from tests.graph.contrib.fused_case import normal
from tests.wild.differences import STEPS, Differences, settled
from tests.wild.double import widened
from tests.wild.original import Original
from tests.wild.surgery import before_saturation, with_adapters

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n'
NET = """g (float[n,4] x) => (float[n,2] y) <float[4,2] w = {1,-2,3,0.5,-1,2,0.25,-0.5}> {
    h = MatMul(x, w) t = Tanh(h) s = Sigmoid(t) y = Identity(s) }"""


def saved(text: str, folder: Path) -> Path:
    onnx.save(onnx.parser.parse_model(HEAD + text), folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.parametrize("wrong", [1.0, 1.003])
def test_a_limit_is_found_behind_curves_and_rounding(wrong: float) -> None:
    rng = np.random.default_rng(0)
    ratios = [
        wrong * (1 + 900 * h**2 + 4e4 * h**4) + 1e-8 / h * rng.standard_normal() for h in STEPS
    ]
    assert abs(settled(STEPS, ratios) - wrong) < 3e-4


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_gradient_that_is_off_is_seen(tmp_path: Path, factor: float) -> None:
    original = Original(saved(NET, tmp_path))
    x, target = normal(3, 4), normal(3, 2)
    w = original.weights(["w"])["w"].astype(np.float64)
    t = np.tanh(x @ w)
    s = 1 / (1 + np.exp(-t))
    dh = 2 * (s - target) / s.size * s * (1 - s) * (1 - t**2)
    gradient = (x.T @ dh * factor).astype(np.float32)
    error = Differences(original, {"x": x}, "y", target).error({"w": gradient}, 1e-3)
    assert error is not None
    assert abs(error - abs(1 / factor - 1)) < 1e-4


FUSED = """g (float[n,4] x) => (float[n,2] y) <float[4,2] w = {1,-2,3,0.5,-1,2,0.25,-0.5}> {
    h = MatMul(x, w)
    y = com.microsoft.FastGelu(h)
}"""


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_fused_operators_are_judged_in_float64_too(factor: float, tmp_path: Path) -> None:
    original = Original(saved(FUSED, tmp_path))
    x, target = normal(3, 4), normal(3, 2)
    h = x @ original.weights(["w"])["w"].astype(np.float64)
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (h + 0.044715 * h**3))
    gelu_grad = 0.5 * (1 + t) + 0.5 * h * (1 - t**2) * c * (1 + 3 * 0.044715 * h**2)
    dh = 2 * (0.5 * h * (1 + t) - target) / h.size * gelu_grad
    gradient = (x.T @ dh * factor).astype(np.float32)
    differences = Differences(original, {"x": x}, "y", target)
    error = differences.error({"w": gradient}, 0.0)
    assert differences.closer == "float64"
    assert error is not None
    assert abs(error - abs(1 / factor - 1)) < 1e-6


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_float16_is_judged_in_float64(tmp_path: Path, factor: float) -> None:
    """Differences in float16 round by more than the error that is looked for."""
    text = "g (float16[n,4] x, float16[4,2] w) => (float16[n,2] y) { h = MatMul(x, w) y = Tanh(h) }"
    path = saved(text, tmp_path)
    model = onnx.load(path)
    w = normal(4, 2).astype(np.float16)
    model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(w, name="w")))
    onnx.save(model, path)
    x, target = normal(3, 4).astype(np.float16), normal(3, 2)
    y = np.tanh(x.astype(np.float64) @ w.astype(np.float64))
    dh = 2 * (y - target) / y.size * (1 - y**2)
    gradient = (x.T.astype(np.float64) @ dh * factor).astype(np.float32)
    differences = Differences(Original(path), {"x": x}, "y", target)
    error = differences.error({"w": gradient}, 0.0)
    assert differences.closer == "float64"
    assert error is not None
    assert abs(error - abs(1 / factor - 1)) < 1e-5


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_error_functions_in_float64_are_not_rounded(tmp_path: Path, approximate: str) -> None:
    text = f"""g (float[n] x) => (float[n] y, float[n] z) {{
        y = Gelu<approximate="{approximate}">(x) z = Erf(x) }}"""
    original = Original(saved(text, tmp_path))
    wide, x = widened(original.proto), np.linspace(-3, 3, 31)
    assert wide is not None
    y, z = wide.run(["y", "z"], {"x": x})
    inner = [math.erf(a / math.sqrt(2)) for a in x]
    if approximate == "tanh":
        inner = [math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)) for a in x]
    np.testing.assert_allclose(y, x * (1 + np.array(inner)) / 2, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(z, [math.erf(a) for a in x], rtol=1e-15)
    own = original.outputs({"x": x.astype(np.float32)})
    np.testing.assert_allclose(y, own["y"], atol=1e-6)
    np.testing.assert_allclose(z, own["z"], atol=1e-6)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("sizes", [(1, 4), (5, 4)])
def test_pooling_in_float64_has_the_windows_of_the_runtime(
    tmp_path: Path, sizes: tuple[int, int], op: str
) -> None:
    text = f"""g (float[1,2,h,w] x) => (float[a,b,c,d] y) {{
        y = {op}<kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,0]>(x) }}"""
    original = Original(saved(text, tmp_path))
    wide, x = widened(original.proto), normal(1, 2, *sizes)
    assert wide is not None
    want = original.outputs({"x": x})["y"]
    np.testing.assert_allclose(wide.run(["y"], {"x": x})[0], want, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_in_float64_is_not_compared(tmp_path: Path) -> None:
    wide = widened(Original(saved("g (float[n] x) => (float[n] y) { y = Log(x) }", tmp_path)).proto)
    assert wide is not None
    with pytest.raises(FloatingPointError, match="finite"), np.errstate(invalid="ignore"):
        wide.run(["y"], {"x": np.array([-1.0])})


SHIFTED = """g (float[n,4] x) => (float[n,2] y) <
    float[4,2] w = {1,-2,3,0.5,-1,2,0.25,-0.5}, float[1] b = {0.5}> {
    h = MatMul(x, w) k = Add(h, b) y = Softmax(k) }"""


@pytest.mark.parametrize(("noise", "right"), [(1e-9, True), (1e-1, False)])
def test_a_weight_without_any_slope_may_have_a_rounded_gradient(
    tmp_path: Path, noise: float, right: bool
) -> None:
    """What is added to all numbers before a softmax changes nothing."""
    original = Original(saved(SHIFTED, tmp_path))
    x, target = normal(3, 4), normal(3, 2)
    e = np.exp(x @ original.weights(["w"])["w"].astype(np.float64))
    y = e / e.sum(-1, keepdims=True)
    dy = 2 * (y - target) / y.size
    w = (x.T @ (y * (dy - (dy * y).sum(-1, keepdims=True)))).astype(np.float32)
    differences = Differences(original, {"x": x}, "y", target)
    error = differences.error({"w": w, "b": np.array([noise], np.float32)}, 1e-3)
    assert error is not None
    assert np.isfinite(error)
    assert (error < 1e-3) == right


def test_a_file_in_float64_gives_its_numbers(tmp_path: Path) -> None:
    original = Original(saved(NET, tmp_path))
    wide, x = widened(original.proto), normal(3, 4)
    assert wide is not None
    (y,) = wide.run(["y"], {"x": x})
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, original.outputs({"x": x})["y"], rtol=1e-6)


def test_the_value_before_the_sigmoid_is_an_output(tmp_path: Path) -> None:
    inner = before_saturation(saved(NET, tmp_path), "y", tmp_path)
    assert inner is not None
    path, name = inner
    x = normal(3, 4)
    outputs = Original(path).outputs({"x": x})
    np.testing.assert_allclose(outputs["y"], 1 / (1 + np.exp(-outputs[name])), rtol=1e-5)
    assert before_saturation(path, name, tmp_path) is None


def test_adapters_are_added_beside_quantized_products(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = saved(
        """g (float[n,32] x) => (float[n,8] y) {
        y = com.microsoft.MatMulNBits<K=32, N=8, bits=4, block_size=32>(x, packed, scales) }""",
        tmp_path,
    )
    model = onnx.load(path)
    arrays = {
        "packed": rng.integers(0, 256, (8, 1, 16)).astype(np.uint8),
        "scales": rng.random(8).astype(np.float32),
    }
    for name, array in arrays.items():
        tensor = ir.serde.serialize_tensor(ir.Tensor(array, name=name))
        model.graph.initializer.append(tensor)
    onnx.save(model, path)
    (tmp_path / "out").mkdir()
    adapted = with_adapters(path, tmp_path / "out")
    assert adapted is not None
    copy, x = Original(adapted), normal(3, 32)
    names = [t.name for t in copy.proto.graph.initializer if "adapter" in t.name]
    down, up = (copy.weights([n])[n] for n in sorted(names))
    session = onnxruntime.InferenceSession(path)
    want = np.asarray(session.run(["y"], {"x": x})[0]) + x @ down @ up
    np.testing.assert_allclose(copy.outputs({"x": x})["y"], want, rtol=1e-4, atol=1e-5)
    assert with_adapters(saved(NET, tmp_path), tmp_path / "out") is None
