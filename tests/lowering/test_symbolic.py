"""Computed shapes become constants for runtimes that require them, with one symbolic size."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.lower import lower

from .single import OPSETS, everything_but, run

REQUIRES_CONSTANTS = everything_but(
    "Shape", Reshape={"const_inputs": [1]}, Slice={"const_inputs": [1, 2]}
)


def _model(make) -> onnx.ModelProto:
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    x = op.input("x", ir.DataType.FLOAT, ["n", 6])
    z = op.input("z", ir.DataType.FLOAT, ["n", 2, 3])
    y = make(op, x, z)
    y.name = "y"
    op.graph.outputs.append(op.Add(y, op.const(1.0)))
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def reshaped() -> onnx.ModelProto:
    """Return a model that reshapes x to the shape of z."""
    return _model(lambda op, x, z: op.Add(op.Reshape(x, op.Shape(z)), z))


def sliced() -> onnx.ModelProto:
    """Return a model that slices x to the number of rows of z."""
    return _model(lambda op, x, z: op.Slice(x, [0], op.Shape(z, end=1), [0]))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("make", [reshaped, sliced])
def test_computed_shapes_become_constants(make, opset: int):
    model = make()
    lowered = lower(model, REQUIRES_CONSTANTS, opset=opset)
    assert "Shape" not in {n.op_type for n in lowered.graph.node}
    rng = np.random.default_rng(0)
    for n in (1, 4):
        feeds = {
            "x": rng.standard_normal((n, 6)).astype(np.float32),
            "z": rng.standard_normal((n, 2, 3)).astype(np.float32),
        }
        np.testing.assert_array_equal(run(lowered, feeds)[0], run(model, feeds)[0])
