"""Gelu's gradient on CPU, in one pass less, is the plain one bit for bit, at odd numbers too."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import onnxtrain

ODD = [np.nan, np.inf, -np.inf, 1e38, -1e38, 40.0, -40.0, 1e-30, -1e-30, 0.0, -0.0]


def test_the_form_for_cpu_is_exact() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) { y = Gelu(x) }'
    )
    x = np.array([*ODD, *np.linspace(-6, 6, 997)], np.float32)
    gradients = []
    for target, kind in (("cpu", "HardSigmoid"), ("cuda", "Add")):
        graph = onnxtrain.vjp(model, wrt=["x"], target=target)
        assert kind in [n.op_type for n in graph.graph.node]
        session = onnxruntime.InferenceSession(
            graph.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        gradients.append(session.run(["x_grad"], {"x": x, "y_grad": np.ones_like(x)})[0])
    np.testing.assert_array_equal(*gradients)
