"""split_qkv: a packed projection is split where it lies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.attention_fusion import split_qkv

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'

# As torch.nn.MultiheadAttention is exported: [s, n, 3 E] -> [3, s, n, E], then one part each.
PACKED = """g (float[s,n,12] x) => (float[s,n,4] q, float[s,n,4] k, float[s,n,4] v)
<int64[4] shape = {0, 0, 3, 4}, int64[1] first = {0}, int64[1] last = {-2},
 int64 zero = {0}, int64 one = {1}, int64 two = {2}> {
    unpacked = Reshape(x, shape)
    unsqueezed = Unsqueeze(unpacked, first)
    moved = Transpose<perm = PERM>(unsqueezed)
    parts = Squeeze(moved, last)
    part_q = Gather<axis = 0>(parts, zero)
    q = Neg(part_q)
    part_k = Gather<axis = 0>(parts, one)
    k = Neg(part_k)
    part_v = Gather<axis = 0>(parts, two)
    v = Neg(part_v)
}"""


def rewritten(text: str) -> tuple[int, onnx.ModelProto, onnx.ModelProto]:
    before = parser.parse_model(HEAD + text)
    model = ir.from_proto(before)
    infer_shapes(model.graph, 21)
    count = split_qkv(model, OpBuilder(model.graph, "split/"))
    simplify(model)
    return count, before, ir.to_proto(model)


def outputs(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return [np.asarray(y) for y in session.run(None, {"x": x})]


def test_parts_are_split_without_moving_elements() -> None:
    count, before, after = rewritten(PACKED.replace("PERM", "[3, 1, 2, 0, 4]"))
    assert count == 1
    assert Counter(n.op_type for n in after.graph.node) == {"Split": 1, "Neg": 3}
    x = np.random.default_rng(0).normal(size=(5, 2, 12)).astype(np.float32)
    for a, b in zip(outputs(before, x), outputs(after, x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stacked_parts_that_are_an_output_stay() -> None:
    text = PACKED.replace("PERM", "[3, 1, 2, 0, 4]")
    count, before, after = rewritten(text.replace("float[s,n,4] v)", "float[p,s,n,4] parts)"))
    assert count == 0
    x = np.random.default_rng(0).normal(size=(3, 2, 12)).astype(np.float32)
    for a, b in zip(outputs(before, x), outputs(after, x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_order_of_axes_stays() -> None:
    count, _, _ = rewritten(PACKED.replace("PERM", "[3, 2, 1, 0, 4]").replace("s,n,4", "n,s,4"))
    assert count == 0
