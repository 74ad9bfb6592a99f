"""Files that onnxruntime runs although ONNX does not define them: repaired, or refused truly."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.errors import LoadError, OnnxTrainError


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


W = random(4, 3)
SQUARE = random(4, 4)


def parse(text: str, opset: int = 17, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]>\n{text}')
    for name, value in weights.items():
        model.graph.initializer.append(ir.to_proto(ir.Tensor(value, name=name)))
    return model


def run(model: onnx.ModelProto, *, optimize: bool = True, **feeds: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, feeds)[0]


def trained(model: onnx.ModelProto, *batch: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the gradients of a batch and the repairs."""
    artifacts = onnxtrain.build(model, loss="mse", optimizer="sgd")
    return onnxtrain.Trainer(artifacts).gradients(*batch), artifacts.manifest.options["repairs"]


def assert_equal(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


LAYER_NORM = """g (float[N,4] x) => (float[N,3] y) {{
    h = MatMul(x, w)  y = LayerNormalization<axis = -1 {attribute}>(h, scale, bias) }}"""
NORM = {"scale": np.float32([1, 2, 0.5]), "bias": np.float32([0, 1, 2])}


@pytest.mark.parametrize("opset", [11, 17])
def test_a_misspelled_attribute_of_layer_norm_is_left_out_as_in_onnxruntime(opset: int) -> None:
    """``epsion``: onnxruntime ignores it and computes with the default."""
    model = parse(LAYER_NORM.format(attribute=", epsion = 0.5"), opset, w=W, **NORM)
    plain = parse(LAYER_NORM.format(attribute=""), opset, w=W, **NORM)
    x = random(5, 4)
    np.testing.assert_array_equal(run(model, x=x), run(plain, x=x))
    target = np.zeros((5, 3), np.float32)
    got, repairs = trained(model, x, target)
    assert_equal(got, trained(plain, x, target)[0])
    (line,) = (line for line in repairs if "epsion" in line)
    assert "(LayerNormalization): unknown attribute 'epsion' left out" in line


def test_a_misspelled_attribute_that_onnxruntime_refuses_is_named() -> None:
    model = parse("g (float[N,4] x) => (float[N,4] y) { y = Gemm<transb = 1>(x, w) }", w=SQUARE)
    with pytest.raises(Exception, match="transb"):
        run(model, x=np.zeros((2, 4), np.float32))
    with pytest.raises(LoadError, match=r"\(Gemm\): unknown attribute 'transb'"):
        onnxtrain.build(model, loss="mse", optimizer="sgd")


@pytest.mark.parametrize("half", ["input", "scale"])
def test_layer_norm_of_an_old_opset_mixes_float16_and_float32(half: str) -> None:
    """onnxruntime's operator of that name computes in float32, in the type of its scale."""
    text = """g (float[N,4] x) => (float[N,3] y) {
        h = MatMul(x, w)  a = Cast<to = INPUT>(h)
        n = LayerNormalization<axis = -1>(a, scale, bias)  y = Cast<to = 1>(n) }"""
    dtype = np.float16 if half == "scale" else np.float32
    norm = {name: value.astype(dtype) for name, value in NORM.items()}
    model = parse(text.replace("INPUT", "10" if half == "input" else "1"), 11, w=W, **norm)
    x = random(5, 4)
    target = np.zeros((5, 3), np.float32)
    got, _ = trained(model, x, target)
    expected, _ = trained(parse(text.replace("INPUT", "1"), 11, w=W, **NORM), x, target)
    np.testing.assert_allclose(got["w"], expected["w"], atol=4e-3 * np.abs(expected["w"]).max())
    artifacts = onnxtrain.build(model, loss="mse", optimizer="sgd")
    y = onnxtrain.Trainer(artifacts).predict(x)["y"]
    np.testing.assert_allclose(y, run(model, x=x), atol=2e-3)


SCAN = """g (float[5,2,4] x) => (float[5,2,4] y) {{
    last, ys = Scan<num_scan_inputs = 1, body = b {body}>(zero, x)  y = Identity(ys) }}"""
PLAIN = """(float[2,4] s, float[2,4] u) => (float[2,4] t, float[2,4] v) {
    a = MatMul(u, w)  t = Add(s, a)  v = Identity(t) }"""


def scan(body: str) -> onnx.ModelProto:
    return parse(SCAN.format(body=body), w=SQUARE, zero=np.zeros((2, 4), np.float32))


def test_a_scan_body_has_names_that_later_nodes_around_it_have() -> None:
    body = PLAIN.replace("float[2,4] v)", "float[2,4] y)").replace("v =", "y =")
    body = body.replace(" t,", " ys,").replace("t =", "ys =").replace("(t)", "(ys)")
    model, plain = scan(body), scan(PLAIN)
    x = random(5, 2, 4)
    np.testing.assert_array_equal(run(model, x=x), run(plain, x=x))
    target = np.zeros_like(x)
    assert_equal(trained(model, x, target)[0], trained(plain, x, target)[0])


def test_a_scan_body_has_a_name_of_an_earlier_node() -> None:
    """onnxruntime refuses these."""
    model = scan(PLAIN)
    model.graph.node.insert(0, onnx.NodeProto(op_type="Neg", input=["zero"], output=["a"]))
    with pytest.raises(Exception, match="a"):
        run(model, x=np.zeros((5, 2, 4), np.float32))
    with pytest.raises(LoadError, match="'a', again by node of 'a' \\(MatMul\\)"):
        onnxtrain.build(model, loss="mse", optimizer="sgd")


@pytest.mark.parametrize("repeated", ["result", "state"])
def test_a_scan_body_returns_a_value_twice(repeated: str) -> None:
    """onnxruntime runs these and loses a value; the Identity of the message repairs them."""
    body = PLAIN.replace("v)", "t)" if repeated == "result" else "s)")
    model, plain = scan(body.replace("v = Identity(t)", "")), scan(PLAIN)
    if repeated == "state":
        plain = scan(PLAIN.replace("Identity(t)", "Identity(s)"))
    x = random(5, 2, 4)
    with pytest.raises(LoadError, match="onnxruntime requires an Identity"):
        onnxtrain.build(model, loss="mse", optimizer="sgd")
    assert trained(plain, x, np.zeros_like(x))[0]["w"].any()


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceL2", "Squeeze", "Unsqueeze"])
@pytest.mark.parametrize("source", ["initializer", "Constant"])
def test_axes_of_a_branch_come_from_the_graph_around_it(op: str, source: str) -> None:
    keep = "<keepdims = 0>" if op.startswith("Reduce") else ""
    before = "h = Unsqueeze(m, axes)" if op == "Squeeze" else "h = Identity(m)"
    constant = "axes = Constant<value_ints = [1]>()" if source == "Constant" else ""
    text = f"""g (bool c, float[N,4] x) => (float[a] y) {{
        {constant}  m = MatMul(x, w)  {before}
        z = If(c) <then_branch = t () => (float[q] r) {{ r = {op}{keep}(h, axes) }},
            else_branch = f () => (float[q] d) {{ d = {op}{keep}(h, axes) }}>
        flat = Constant<value_ints = [-1]>()  y = Reshape(z, flat) }}"""
    for value in ("q", "a"):
        text = text.replace(f"float[{value}]", "float[]" if value == "q" else "float[k]")
    model = parse(text, 18, w=SQUARE, **({} if constant else {"axes": np.int64([1])}))
    for attribute in next(n for n in model.graph.node if n.op_type == "If").attribute:
        attribute.g.output[0].type.tensor_type.ClearField("shape")
    x = random(5, 4)
    y = run(model, c=np.array(True), x=x)
    got, _ = trained(model, np.array(True), x, np.zeros_like(y))
    m = x @ SQUARE
    up = {"ReduceMean": np.repeat(m.mean(1, keepdims=True) / 4, 4, 1), "ReduceL2": m}.get(op, m)
    np.testing.assert_allclose(got["w"], x.T @ up * 2 / y.size, rtol=1e-4, atol=1e-5)


def test_an_output_that_is_declared_a_scalar_has_a_row_for_each_example() -> None:
    """Exporters that traced one example: Squeeze without axes, and a scalar as output."""
    model = parse(
        "g (float[N,4] x) => (float y) { h = MatMul(x, w)  s = Squeeze(h)  y = Sigmoid(s) }",
        11,
        w=W[:, :1],
    )
    x = random(5, 4)
    trainer = onnxtrain.Trainer(onnxtrain.build(model, loss="mse", optimizer="sgd"))
    y = run(model, x=x)
    np.testing.assert_allclose(trainer.predict(x)["y"], y, rtol=1e-4)
    got = trainer.gradients(x, np.zeros(5, np.float32))["w"]
    np.testing.assert_allclose(got[:, 0], x.T @ (y * y * (1 - y)) * 2 / 5, rtol=1e-4)


def test_sizes_in_a_hint_are_those_of_the_file() -> None:
    """Names with characters that symbols cannot have, beside names of the loss's own input."""
    model = parse(
        "g (float[A,B] x) => (float[c,d] y) { h = MatMul(x, w)  s = Squeeze(h)  y = MatMul(s, w) }",
        w=SQUARE,
    )
    shape = model.graph.input[0].type.tensor_type.shape
    shape.dim[0].dim_param, shape.dim[1].dim_param = "DynamicDimension.3", "p2o.Dim-1"
    with pytest.raises(OnnxTrainError) as error:
        onnxtrain.build(model, loss="mse", optimizer="sgd")
    hint = re.search(r"dims=\{'(.*)': (\d+)\}", str(error.value))
    assert hint is not None
    assert hint[1] == "DynamicDimension.3"
    assert onnxtrain.build(model, loss="mse", optimizer="sgd", dims={hint[1]: int(hint[2])})


BATCH_NORM = """g (float[1,5] x) => (float[{dims}] y) <int64[4] shape = {{-1, 1, 1, 5}}> {{
    h = MatMul(x, w)  {between}
    y = BatchNormalization(r, scale, bias, mean, scale) }}"""


@pytest.mark.parametrize("transposed", [False, True])
def test_batch_norm_after_a_reshape_of_an_old_opset(transposed: bool) -> None:
    """On the channels it trains; on another axis only onnxruntime's fusion runs it."""
    between, dims = "r = Reshape(h, shape)", "1,1,1,5"
    if transposed:
        between = "q = Reshape(h, shape)  r = Transpose<perm = [0, 3, 1, 2]>(q)"
        dims = "1,5,1,1"
    five = np.float32([1, 2, 3, 4, 5])
    w = random(5, 5)
    text = BATCH_NORM.format(between=between, dims=dims)
    model = parse(text, 8, w=w, scale=five, bias=five, mean=five)
    x = random(1, 5)
    if transposed:
        artifacts = onnxtrain.build(model, loss="mse", optimizer="sgd")
        y = onnxtrain.Trainer(artifacts).predict(x)["y"]
        np.testing.assert_allclose(y, run(model, x=x), rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(Exception, match="Invalid input scale"):
        run(model, optimize=False, x=x)
    with pytest.raises(OnnxTrainError, match=r"incompatible shapes at node '.*': BatchNorm"):
        onnxtrain.build(model, loss="mse", optimizer="sgd")
