"""A second oracle: onnx-ad differentiates the same graphs with its own rules."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from tests.cases.evaluate import stock

onnx_ad = pytest.importorskip("onnx_ad", reason="onnx-ad is a development dependency")

MODELS = {
    "arithmetic": """(float[3,4] x, float[4] w) => (float[3,4] y) {
        a = Mul(x, w)  b = Sub(a, x)  c = Exp(b)  one = Constant <value_float = 1.0> ()
        d = Add(c, one)  y = Div(a, d) }""",
    "activations": """(float[3,4] x) => (float[3,4] y) {
        a = Tanh(x)  b = Sigmoid(a)  c = Softplus(b)  d = Elu <alpha = 0.5> (c)
        e = LeakyRelu(x)  f = Gelu(e)  g = Mish(f)  y = Mul(d, g) }""",
    "trigonometry": """(float[5] x) => (float[5] y) {
        a = Sin(x)  b = Cos(a)  c = Atan(b)  d = Sinh(c)  e = Erf(x)  y = Mul(d, e) }""",
    "mlp": """(float[2,3] x, float[3,5] w, float[5] b, float[5,2] v) => (float[2,2] y) {
        a = Gemm(x, w, b)  h = Relu(a)  p = MatMul(h, v)  y = LogSoftmax(p) }""",
    "batch": """(float[N,3] x, float[3,5] w, float[5] b) => (float[N,5] y) {
        a = MatMul(x, w)  h = Add(a, b)  y = Softmax(h) }""",
    "broadcast": """(float[2,1,4] x, float[3,1] w) => (float[2,3,4] y) {
        p = Abs(x)  one = Constant <value_float = 0.5> ()  q = Add(p, one)  y = Pow(q, w) }""",
    "reductions": """(float[2,3,4] x) => (float[2,4] a, float[3] b, float c) {
        axes = Constant <value_ints = [1]> ()  a = ReduceLogSumExp <keepdims = 0> (x, axes)
        both = Constant <value_ints = [0, 2]> ()  b = ReduceL2 <keepdims = 0> (x, both)
        c = ReduceMean <keepdims = 0> (x) }""",
    "convolution": """(float[1,2,6,6] x, float[3,2,3,3] w, float[3] b) => (float[1,3,3,3] y) {
        y = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w, b) }""",
    "pooling": """(float[1,2,6,6] x) => (float[1,2,3,3] y, float[1,2,1,1] z) {
        y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
        a = AveragePool <kernel_shape = [2, 2]> (x)  z = GlobalAveragePool(a) }""",
    "movement": """(float[2,3,4] x) => (float[4,4] y) <int64[1] i={1}, int64[1] j={5}> {
        t = Transpose <perm = [2, 0, 1]> (x)  s = Constant <value_ints = [4, 6]> ()
        r = Reshape(t, s)  y = Slice(r, i, j, i, i) }""",
    "joining": """(float[2,3] x, float[2,3] z) => (float[2,6] y, float[2,2] p) {
        y = Concat <axis = 1> (x, z)  n = Constant <value_ints = [2, 4]> ()
        p, q = Split <axis = 1> (y, n) }""",
    "gathering": """(float[5,3] x, int64[4] i) => (float[4,3] y) {
        g = Gather(x, i)  y = Mul(g, g) }""",
    "layer-norm": """(float[2,4] x, float[4] s, float[4] b) => (float[2,4] y) {
        y = LayerNormalization(x, s, b) }""",
    "instance-norm": """(float[2,3,5] x, float[3] s, float[3] b) => (float[2,3,5] y) {
        y = InstanceNormalization(x, s, b) }""",
    "attention": """(float[2,3,4] q, float[2,5,4] k, float[2,5,4] v) => (float[2,3,4] y) {
        t = Transpose <perm = [0, 2, 1]> (k)  s = MatMul(q, t)  h = Constant <value_float = 0.5> ()
        d = Mul(s, h)  p = Softmax(d)  y = MatMul(p, v) }""",
    "where-and-clip": """(float[3,4] x, float[3,4] z) => (float[3,4] y) {
        c = Less(x, z)  w = Where(c, x, z)  low = Constant <value_float = -0.5> ()
        high = Constant <value_float = 0.7> ()  y = Clip(w, low, high) }""",
    "scan": """(float[4,3] x, float[3] s) => (float[3] t, float[4,3] y) {
        t, y = Scan <num_scan_inputs = 1,
            body = step (float[3] a, float[3] b) => (float[3] c, float[3] d) {
            m = Mul(a, b)  c = Tanh(m)  d = Add(c, b) }> (s, x) }""",
    "resize": """(float[1,1,3,3] x) => (float[1,1,6,6] y) {
        s = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()
        y = Resize <mode = "linear"> (x, , s) }""",
}


def build(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {MODELS[name]}')


def is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def draw(values: object, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = []
    for value in values:  # type: ignore[attr-defined]
        shape = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
        real = rng.standard_normal(shape).astype(np.float32)
        arrays.append(real if is_float(value) else rng.integers(0, 5, shape))
    return arrays


def theirs(transform, model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        made = transform(model, layout="onnx")
    except onnx_ad.UnsupportedOperator as error:
        pytest.skip(f"onnx-ad has no rule: {error}")
    made.ir_version = min(made.ir_version, 10)
    return made


def compare(ours: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(ours) == len(other)
    for a, b in zip(ours, other, strict=True):
        np.testing.assert_allclose(a, b[..., 0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_reverse(name: str) -> None:
    model = build(name)
    wrt = [v.name for v in model.graph.input if is_float(v)]
    inputs, seeds = draw(model.graph.input, 1), draw(model.graph.output, 2)
    ours = stock(onnxtrain.vjp(model, wrt))([*inputs, *seeds])
    other = stock(theirs(onnx_ad.reverse, model))([*inputs, *(s[..., None] for s in seeds)])
    compare(ours[len(seeds) :], other[len(seeds) :])


@pytest.mark.parametrize("name", ["mlp", "attention", "reductions", "where-and-clip", "gathering"])
def test_forward(name: str) -> None:
    model = build(name)
    wrt = [v for v in model.graph.input if is_float(v)]
    inputs, seeds = draw(model.graph.input, 1), draw(wrt, 2)
    ours = stock(onnxtrain.jvp(model, [v.name for v in wrt]))([*inputs, *seeds])
    other = stock(theirs(onnx_ad.forward, model))([*inputs, *(s[..., None] for s in seeds)])
    split = len(model.graph.output)
    compare(ours[split:], other[split:])


@pytest.mark.parametrize("name", ["mlp", "attention", "convolution", "arithmetic"])
def test_their_gradients_of_our_gradients(name: str) -> None:
    """What we emit is plain ONNX: another tool differentiates it, and agrees with us."""
    model = build(name)
    wrt = [v.name for v in model.graph.input]
    first = onnxtrain.vjp(model, wrt)
    outputs = [v.name for v in first.graph.output]
    inputs = draw(first.graph.input, 1)
    seeds = draw(first.graph.output, 2)
    second = onnxtrain.vjp(first, [v.name for v in first.graph.input], outputs)
    ours = stock(second)([*inputs, *seeds])
    other = stock(theirs(onnx_ad.reverse, first))([*inputs, *(s[..., None] for s in seeds)])
    compare(ours[len(outputs) :], other[len(outputs) :])
