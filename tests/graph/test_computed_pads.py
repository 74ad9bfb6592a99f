"""Shape inference with pads that the model computes from constants."""

from __future__ import annotations

import numpy as np
import onnx.parser

from onnxtrain.graph.io import load
from onnxtrain.graph.shapes import dims_of
from onnxtrain.importer import prepare


def test_computed_pads_give_static_sizes() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 13]>
    computed (float[batch, 3, 16, 16] x) => (float[n, c, h, w] y)
      <float weight = {2.0}>
    {
      sides = Constant<value = int64[4] {0, 0, 2, 2}>()
      halves = Cast<to = 1>(sides)
      back = Cast<to = 7>(halves)
      pads = Concat<axis = 0>(back, back)
      padded = Pad<mode = "reflect">(x, pads)
      y = Mul(padded, weight)
    }
    """
    model = prepare(load(onnx.parser.parse_model(text))).model
    (pad,) = (n for n in model.graph if n.op_type == "Pad")
    dims = dims_of(pad.outputs[0])
    assert dims is not None
    np.testing.assert_array_equal(dims[1:], [3, 20, 20])
