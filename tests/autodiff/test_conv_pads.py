"""Gradients of convolutions emit Pad nodes without an ``axes`` input, for onnxruntime-web."""

from __future__ import annotations

import onnx.parser
import pytest

import onnxtrain

MODEL = """
<ir_version: 10, opset_import: ["": 21]>
model (float[batch, 6, 16] x) => (float[batch, 4] y)
<
    float[1, 1, 5] tap = {0.1, -0.2, 0.3, 0.4, -0.5},
    int64[3] shape = {4, 16, 5}, int64[1] axes = {2}
> {
    columns = Transpose <perm = [0, 2, 1]> (x)
    w = Expand (tap, shape)
    h = Conv <kernel_shape = [5], %s> (columns, w)
    y = ReduceMax <keepdims = 0> (h, axes)
}
"""


@pytest.mark.parametrize("conv", ["pads = [4, 0]", 'auto_pad = "SAME_UPPER"'], ids=["pads", "same"])
@pytest.mark.parametrize("target", ["webgpu", "wasm"])
def test_no_pad_has_an_axes_input(conv: str, target: str):
    """onnxruntime-web moves a Transpose through a Pad and ignores the axes input."""
    model = onnx.parser.parse_model(MODEL % conv)
    artifacts = onnxtrain.build(model, loss="mse", optimizer="sgd", target=target)
    pads = [
        node
        for part in artifacts.models.values()
        for node in part.graph.node
        if node.op_type == "Pad"
    ]
    assert all(len(node.input) < 4 for node in pads)
    if target == "webgpu":
        assert pads
