"""Models that are too large to run or to fold are refused quickly, with the node's name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import VerificationError
from tests.soon import is_soon

HEAD = '<ir_version: 8, opset_import: ["": 17]> g'
TOO_LARGE = {
    "inputs": "(float[60000, 6000] x) => (float[a, b] y) { y = Relu(x) }",
    "more than the address space": f"(float[{2**61}, 6] x) => (float[a, b] y) {{ y = Relu(x) }}",
    "a loop": """(float[2] x) => (float[2] y)
        <int64 n = {1000000000}, bool c = {1}> {
        y = Loop(n, c, x) <body = b (int64 i, bool p, float[2] u) => (bool q, float[2] v) {
            q = Identity(p)
            v = Relu(u)
        }> }""",
    "a recurrence": """(float[1, 1, 1] x, float[1, 3, 1] w, float[1, 3, 1] r)
        => (float[a, b, c, d] y) <int64[3] k = {10000000, 1, 1}> {
        long = Expand(x, k)
        y = GRU<hidden_size = 1>(long, w, r) }""",
    "windows": """(float[1, 1, 6000, 2000] x) => (float[a, b, c, d] y) {
        y = AveragePool<kernel_shape = [3000, 1000]>(x) }""",
    "a tensor": """(float[1] x) => (float[n] y) <int64[1] k = {8589934592}> {
        z = ConstantOfShape(k)
        y = Add(x, z) }""",
    "a range": """(float x) => (float[n] y)
        <float a = {0}, float b = {8e9}, float c = {1}> {
        z = Range(a, b, c)
        y = Add(x, z) }""",
    "a window": """(float x) => (float[n] y) <int64 k = {8589934592}> {
        z = HannWindow(k)
        y = Add(x, z) }""",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_too_large_to_be_verified(name: str):
    model = onnx.parser.parse_model(HEAD + TOO_LARGE[name])

    def lower_with_and_without_verify() -> None:
        with pytest.raises(VerificationError, match=r"too large to verify[\s\S]*verify=False"):
            onnxtrain.lower(model, opset=14)
        onnxtrain.lower(model, opset=18, verify=False)

    assert is_soon(lower_with_and_without_verify)


def test_an_lstm_with_an_empty_batch_is_not_run():
    """onnxruntime crashes the process on it."""
    text = """(float[3, 0, 1] x) => (float[a, b, c, d] y)
        <float[1, 4, 1] w = {1, 2, 3, 4}, float[1, 4, 1] r = {1, 2, 3, 4}> {
        y = LSTM<hidden_size = 1>(x, w, r) }"""
    with pytest.raises(VerificationError, match=r"LSTM.* with empty inputs"):
        onnxtrain.lower(onnx.parser.parse_model(HEAD + text), opset=14)


def test_vjp_creates_no_huge_vector_of_ones():
    text = """(float[2147483648, 2, 4] x) => (float[a, b, c] y) <float[4, 512] w, float[512] b> {
        h = MatMul(x, w)
        y = Add(h, b) }"""
    model = onnx.parser.parse_model(HEAD + text)
    del model.graph.value_info[:]
    for name, sizes in (("w", [4, 512]), ("b", [512])):
        weight = ir.tensor(np.ones(sizes, np.float32), name=name)
        model.graph.initializer.append(ir.serde.serialize_tensor(weight))
    onnxtrain.vjp(model, ["x"])


def test_a_loop_that_its_condition_ends_is_run():
    model = onnx.parser.parse_model(
        HEAD
        + """(float[2] x) => (float[2] y)
        <int64 n = {9223372036854775807}, bool c = {1}, int64 last = {3}> {
        y = Loop(n, c, x) <body = b (int64 i, bool p, float[2] u) => (bool q, float[2] v) {
            q = Less(i, last)
            v = Relu(u)
        }> }"""
    )
    onnxtrain.lower(model, opset=13)


def test_a_scalar_bool_input_is_verified():
    model = onnx.parser.parse_model(
        HEAD
        + """(bool flag, float[2] x) => (float[2] y) {
        y = If(flag) <then_branch = t () => (float[2] a) { a = Relu(x) },
                      else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
    )
    lowered = onnxtrain.lower(model, opset=13)
    session = onnxruntime.InferenceSession(lowered.SerializeToString())
    x = np.array([-1, 2], np.float32)
    np.testing.assert_array_equal(session.run(None, {"flag": np.array(False), "x": x})[0], -x)


@pytest.mark.parametrize("doublings", [25, 26])
def test_symbolic_sizes_that_double_are_refused_before_they_run(doublings: int) -> None:
    """A file of a kilobyte took 5.4 GB: its sizes are known once the inputs have one."""
    body = " ".join(f"h{i + 1} = Concat<axis = 0>(h{i}, h{i})" for i in range(doublings))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        f"g (float[N] h0) => (float[M] h{doublings}) {{ {body} }}"
    )
    with pytest.raises(
        VerificationError, match=r"too large to verify(.|\n)*elements, the limit is"
    ):
        onnxtrain.lower(model, opset=12)
