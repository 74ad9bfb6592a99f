"""Negative sizes raise an error that names the node; onnx's inference would abort the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxtrain

CUT = "int64[2] s = {0, 0}, int64[2] e = {9, 2}"
CUT4 = "int64[4] s = {0, 0, 0, 0}, int64[4] e = {9, 9, 9, 2}"
FLAT, IMAGE = "(float[2, 5] x) => (float[a, b] y)", "(float[1, 1, 5, 5] x) => (float[a, b, c, d] y)"
GRAPHS = {
    "TopK": f"{FLAT} <int64[1] k = {{-5}}, {CUT}> {{ v, i = TopK(x, k) y = Slice(v, s, e) }}",
    "Pad": f"{FLAT} <int64[4] k = {{-9, 0, 0, 0}}, {CUT}> {{ v = Pad(x, k) y = Slice(v, s, e) }}",
    "Split": f"{FLAT} <int64[2] k = {{-2, 4}}, {CUT}> {{ v, w = Split(x, k) y = Slice(v, s, e) }}",
    "MaxPool": f"{IMAGE} <{CUT4}> {{ v = MaxPool<kernel_shape = [9, 9]>(x) y = Slice(v, s, e) }}",
}
PROGRAM = """
import sys
import onnxtrain
from onnxtrain.errors import PrepareError
data = sys.stdin.buffer.read()
entry_points = (
    onnxtrain.explain,
    lambda model: onnxtrain.vjp(model, ["x"]),
    lambda model: onnxtrain.lower(model, opset=12),
)
for entry_point in entry_points:
    try:
        entry_point(data)
    except PrepareError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("kind", GRAPHS)
def test_negative_size_raises(kind: str, opset: int):
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g {GRAPHS[kind]}'
    data = onnx.parser.parse_model(text).SerializeToString()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=data, capture_output=True, check=False
    )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert len(lines) == 3
    assert all(kind in line and "negative size" in line for line in lines)


UNTAKEN = """<ir_version: 10, opset_import: ["": 20]>
    g (float[4] x, int64[4] i, bool c) => (float[4] y)
    <int64[2] k = {5, -1}, int64[1] s = {0}, int64[1] e = {2}> {
    h = Slice(i, s, e)
    n = If(c) <then_branch = t () => (int64[1] p) {
                   v, w = Split<axis = 0>(i, k)
                   p = ReduceSum(v) },
               else_branch = f () => (int64[1] q) { q = ReduceSum(h) }>
    m = Cast<to = 1>(n)
    y = Mul(x, m) }"""


def test_negative_size_in_an_unused_branch():
    model = onnx.parser.parse_model(UNTAKEN)
    onnxtrain.explain(model)
    session = onnxruntime.InferenceSession(onnxtrain.vjp(model, ["x"]).SerializeToString())
    x, i = np.arange(4, dtype=np.float32), np.asarray([3, 4, 5, 6])
    feeds = {"x": x, "i": i, "c": np.asarray(False), "y_grad": np.ones(4, np.float32)}
    y, dx = session.run(None, feeds)
    np.testing.assert_array_equal(y, 7 * x)
    np.testing.assert_array_equal(dx, [7, 7, 7, 7])
