"""Inputs that a graph may overwrite with its outputs."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from onnxtrain.artifacts.update import overwritable_inputs
from onnxtrain.manifest import ModelSpec, TensorSpec

CASES = {
    "the writer reads it": ("q = Sub(p, g)", True),
    "an ancestor reads it": ("h = Mul(p, g) q = Sub(p, h)", True),
    "a stranger reads it": ("q = Sub(p, g) z = Mul(p, p)", False),
    "a later node reads it": ("q = Sub(p, g) z = Mul(p, q)", False),
    "nobody reads it": ("q = Neg(g)", True),
    "the writer is not elementwise": ("q = Softmax(p)", False),
    "a branch reads it": (
        (
            "q = If (c) <then_branch = a () => (float[2] y) { y = Neg(p) },"
            " else_branch = b () => (float[2] z) { z = Abs(p) }>"
        ),
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_overwritable(case: str) -> None:
    body, allowed = CASES[case]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        f"g (bool c, float[2] p, float[2] g) => (float[2] q) {{ {body} }}"
    )
    p = TensorSpec("p", "float32", (2,), "parameter")
    q = TensorSpec("q", "float32", (2,), "parameter", feeds="p")
    spec = ModelSpec("optimizer", "x.onnx", (p,), (q,))
    assert overwritable_inputs(ir.from_proto(model).graph, spec) == (("p",) if allowed else ())
