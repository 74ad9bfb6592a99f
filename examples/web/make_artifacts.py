"""Write the artifacts of the example pages: a classifier for points in the plane.

Run as ``python make_artifacts.py OUT``. The input is ``point``, the output ``logits``.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
import onnx_ir as ir

from onnxtrain import build

TEXT = """
<ir_version: 10, opset_import: ["": 21]>
points (float[batch, 2] point) => (float[batch, 2] logits) {
  hidden = Gemm(point, w1, b1)
  active = Tanh(hidden)
  logits = Gemm(active, w2, b2)
}
"""
SHAPES = {"w1": (2, 24), "b1": (24,), "w2": (24, 2), "b2": (2,)}

if __name__ == "__main__":
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(ir.to_proto(ir.tensor(values, name=name)))
    built = build(
        model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"], target="web"
    )
    built.save(sys.argv[1])
