"""deduplicate_slices: gradients of interleaved slices are concatenated."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
NUMBERS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] again = {0},
  int64[1] end = {9223372036854775807}, int64[1] three = {3}, int64[1] minus = {-1}"""


def merging() -> onnx.ModelProto:
    """Return what joins each square of four positions, cut out as exporters do it."""
    lines = []
    for i, (row, column) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        start = ("zero" if i else "again") if row == 0 else "one"
        lines.append(f"r{i} = Slice(x, {start}, end, one, two)")
        lines.append(f"c{i} = Slice(r{i}, {'zero' if column == 0 else 'one'}, end, two, two)")
        lines.append(f"p{i} = Slice(c{i}, zero, end, three, one)")
    body = "\n".join(lines)
    return parser.parse_model(
        HEAD
        + f"""g (float[2,4,6,3] x) => (float[2,2,3,12] y) <{NUMBERS}> {{
        {body}
        y = Concat<axis=-1>(p0, p1, p2, p3)
    }}"""
    )


def gradient(model: onnx.ModelProto, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [v.name for v in session.get_inputs()]
    return np.asarray(session.run(None, dict(zip(names, [x, dy], strict=True)))[1])


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_gradients_of_interleaved_slices_are_concatenated(target: str) -> None:
    made = onnxtrain.vjp(merging(), ["x"], target=target)
    counts = collections.Counter(n.op_type for n in made.graph.node)
    assert counts["Pad"] == counts["Add"] == counts["ScatterND"] == 0
    assert counts["Slice"] <= 6  # two halves, and two of each
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal(s).astype(np.float32) for s in [(2, 4, 6, 3), (2, 2, 3, 12)])
    want = np.zeros_like(x)
    for i, (row, column) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        want[:, row::2, column::2] = dy[..., 3 * i : 3 * i + 3]
    np.testing.assert_array_equal(gradient(made, dy, x), want)


@pytest.mark.parametrize(
    ("cut", "left"),
    [
        ("Slice(x, one, end, one, two)", 2),  # other numbers
        ("Slice(x, zero, end, one, two)", 1),
        ("Slice(x, minus, again, one, minus)", 2),
    ],
)
def test_only_equal_slices_are_merged(cut: str, left: int) -> None:
    text = f"""g (float[2,4] x) => (float[m,n] y) <{NUMBERS}> {{
        a = Slice(x, again, end, one, two)
        b = {cut}
        e = Exp(a)
        y = Concat<axis=1>(e, b)
    }}"""
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), ["x"])
    forward = [n for n in made.graph.node if n.op_type == "Slice" and n.input[0] == "x"]
    assert len(forward) == left
