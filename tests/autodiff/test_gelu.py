"""The CPU variant of Gelu's gradient equals the plain one bitwise, also at special values."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import onnxtrain

SPECIAL_VALUES = [np.nan, np.inf, -np.inf, 1e38, -1e38, 40.0, -40.0, 1e-30, -1e-30, 0.0, -0.0]


def test_the_cpu_variant_is_exact() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) { y = Gelu(x) }'
    )
    x = np.array([*SPECIAL_VALUES, *np.linspace(-6, 6, 997)], np.float32)
    gradients = []
    for target, kind in (("cpu", "HardSigmoid"), ("cuda", "Add")):
        graph = onnxtrain.vjp(model, wrt=["x"], target=target)
        assert kind in [n.op_type for n in graph.graph.node]
        session = onnxruntime.InferenceSession(
            graph.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        gradients.append(session.run(["x_grad"], {"x": x, "y_grad": np.ones_like(x)})[0])
    np.testing.assert_array_equal(*gradients)
