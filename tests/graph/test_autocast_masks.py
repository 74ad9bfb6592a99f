"""Matmul results masked with zero stay in 16 bits; other masked results do not."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.modes.mixed_precision import autocast

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def type_of_where(number: str) -> ir.DataType | None:
    text = f"""g (float[4, 4] a, float[4, 4] b, bool[4, 4] m) => (float[4, 4] y) {{
        n = Constant<value_float = {number}>() c = MatMul(a, b) w = Where(m, c, n) y = Relu(w) }}"""
    proto = onnx.shape_inference.infer_shapes(parser.parse_model(HEAD + text))
    model = ir.from_proto(proto)
    for node in list(model.graph):
        if node.op_type == "Constant":
            tensor = node.attributes["value_float"].as_float()
            value = ir.Value(name="number", const_value=ir.tensor(tensor, ir.DataType.FLOAT))
            value.shape, value.type = ir.Shape(()), ir.TensorType(ir.DataType.FLOAT)
            model.graph.register_initializer(value)
            node.outputs[0].replace_all_uses_with(value)
    autocast(model, ir.DataType.BFLOAT16, target="cuda")
    (where,) = (n for n in model.graph if n.op_type == "Where")
    return where.outputs[0].dtype


def test_zero_masks_stay_in_16_bits() -> None:
    assert type_of_where("0.0") == ir.DataType.BFLOAT16


@pytest.mark.parametrize("number", ["-3.4028234e38", "-1e30"])
def test_large_negative_masks_do_not(number: str) -> None:
    assert type_of_where(number) == ir.DataType.FLOAT
