"""The gradient graphs of three small models as text, so that a review shows the changed graph.

``UPDATE_GOLDEN=1 pytest tests/test_golden.py`` rewrites the files of ``tests/golden``.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import onnxtrain

GOLDEN = Path(__file__).parent / "golden"

MODELS = {
    "mlp": """
        mlp (float[N,3] x, int64[N] label) => (float loss)
        <float[3,4] w1 = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1,1.2}, float[4] b1 = {0,0,0,0},
         float[4,2] w2 = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8}, float[2] b2 = {0,0}> {
            pre = Gemm (x, w1, b1)
            hidden = Relu (pre)
            logits = Gemm (hidden, w2, b2)
            loss = SoftmaxCrossEntropyLoss (logits, label)
        }
    """,
    "cnn": """
        cnn (float[N,1,6,6] image) => (float[N,2] logits)
        <float[2,1,3,3] w = {1,2,3,4,5,6,7,8,9,9,8,7,6,5,4,3,2,1}, float[2] b = {0,0},
         float[18,2] fc = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,
                           1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}> {
            map = Conv <pads = [1, 1, 1, 1]> (image, w, b)
            active = Relu (map)
            small = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (active)
            flat = Flatten (small)
            logits = MatMul (flat, fc)
        }
    """,
    "attention": """
        attention (float[N,T,4] x) => (float[N,T,4] y)
        <float[4,4] wq = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1},
         float[4,4] wk = {0,1,0,0,1,0,0,0,0,0,0,1,0,0,1,0},
         float[4,4] wv = {0,0,0,1,0,0,1,0,0,1,0,0,1,0,0,0},
         float[4] scale = {1,1,1,1}, float[4] bias = {0,0,0,0}, float half = {0.5}> {
            normed = LayerNormalization (x, scale, bias)
            q = MatMul (normed, wq)
            k = MatMul (normed, wk)
            v = MatMul (normed, wv)
            kt = Transpose <perm = [0, 2, 1]> (k)
            raw = MatMul (q, kt)
            scores = Mul (raw, half)
            weights = Softmax <axis = -1> (scores)
            mixed = MatMul (weights, v)
            y = Add (x, mixed)
        }
    """,
}
TRAINED = {
    "mlp": ["w1", "b1", "w2", "b2"],
    "cnn": ["w", "b", "fc"],
    "attention": ["wq", "wk", "wv", "scale", "bias"],
}


def gradient_text(name: str) -> str:
    """The gradient model of a golden model as ONNX text, without node names and inner shapes."""
    header = '<ir_version: 10, opset_import: ["" : 21]>'
    model = onnx.parser.parse_model(header + MODELS[name])
    gradients = onnxtrain.vjp(model, TRAINED[name])
    del gradients.graph.value_info[:]  # one endless line, in which no diff can be read
    for node in gradients.graph.node:
        node.name = ""
    lines = ir.to_onnx_text(ir.from_proto(gradients)).splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_gradient_graph_is_the_golden_one(name: str) -> None:
    path = GOLDEN / f"{name}.onnx.txt"
    text = gradient_text(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        "the gradient graph has changed; if that is intended, run "
        "UPDATE_GOLDEN=1 pytest tests/test_golden.py and look at the diff"
    )
