"""Nodes restated at an older opset compute the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.lowering.lower import downgrade_opset
from tests.compat.models import model_of

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)

CASES = {
    "axes": (13, lambda op, x: op.ReduceMax(x, [1, -1], keepdims=0)),
    "no axes": (13, lambda op, x: op.ReduceMean(x, keepdims=0)),
    "sum": (12, lambda op, x: op.ReduceSum(x, [0], keepdims=1)),
    "squeeze": (12, lambda op, x: op.Squeeze(op.Unsqueeze(x, [0, 2]), [0])),
    "part of a shape": (14, lambda op, x: op.Shape(x, start=-2, end=2)),
    "end of a shape": (13, lambda op, x: op.Shape(x, start=1)),
    "all of a shape": (13, lambda op, x: op.Shape(x, start=-3, end=7)),
    "scatter": (16, lambda op, x: op.ScatterND(x, [[0], [0]], op.Add(x, 1.0), reduction="add")),
    "cast": (13, lambda op, x: op.Cast(x, to=7)),
    "pad": (13, lambda op, x: op.Pad(x, [0, 1, 0, 0, 0, 2], 3.0)),
    "softmax": (13, lambda op, x: op.Softmax(x, axis=1)),
    "branch": (14, lambda op, x: _branch(op, x)),
}
STUCK = {
    "scatter": (13, lambda op, x: op.ScatterND(x, [[0]], op.Slice(x, [0], [1]), reduction="add")),
    "scatter max": (16, lambda op, x: op.ScatterND(x, [[0], [1]], x, reduction="max")),
    "softmax": (12, lambda op, x: op.Softmax(x, axis=1)),
    "axes that are computed": (13, lambda op, x: op.ReduceMax(x, op.Sub(op.Shape(op.Shape(x)), 1))),
    "new": (16, lambda op, x: op.LayerNormalization(x, np.ones(4, np.float32))),
    "too old": (9, lambda op, x: op.Relu(x)),
}


def _branch(op, x):
    then, other = op.body(), op.body()
    then.graph.outputs.append(then.Shape(x, start=1))
    other.graph.outputs.append(other.Shape(x, start=0, end=2))
    return op.If(
        op.Greater(op.ReduceSum(x, keepdims=0), 0.0),
        then_branch=then.graph,
        else_branch=other.graph,
    )


def run(model: onnx.ModelProto) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]


def made(build):
    return model_of({"x": [2, 3, 4]}, {}, lambda op, x: {"y": build(op, x)}, opset=21)


@pytest.mark.parametrize("case", CASES)
def test_the_older_form_computes_the_same(case):
    opset, build = CASES[case]
    original = made(build)
    original.ir_version = 10
    model = ir.from_proto(original)
    assert downgrade_opset(model, opset) == []
    lowered = ir.to_proto(model)
    assert lowered.opset_import[0].version == opset
    np.testing.assert_array_equal(run(lowered), run(original))


@pytest.mark.parametrize("case", STUCK)
def test_what_cannot_be_said_stays_as_it_is(case):
    opset, build = STUCK[case]
    model = ir.from_proto(made(build))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert downgrade_opset(model, opset)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_newer_opset_is_not_touched():
    model = ir.from_proto(made(lambda op, x: op.Relu(x)))
    assert downgrade_opset(model, 22) == []
    assert model.opset_imports[""] == 21


def test_unknown_ranks_and_other_domains_stay():
    """What an older opset says without the rank is restated; custom operators are not touched."""
    original = made(lambda op, x: op.Softmax(op.ReduceMean(x, [2]), axis=-1))
    del original.graph.value_info[:]
    original.graph.node.add(op_type="Swirl", domain="acme", input=["x"], output=["z"])
    original.opset_import.add(domain="acme", version=1)
    original.graph.output.add(name="z").type.CopyFrom(original.graph.input[0].type)
    model = ir.from_proto(original)
    assert downgrade_opset(model, 13) == []
    assert [(n.domain, n.op_type) for n in model.graph] == [
        ("", "ReduceMean"),
        ("", "Softmax"),
        ("acme", "Swirl"),
    ]
    assert model.opset_imports == {"": 13, "acme": 1}
