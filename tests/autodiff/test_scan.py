"""Backward pass of a Scan: what runs in its body and what runs outside."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import onnxtrain

STEPS, BATCH, WIDTH = 5, 3, 4


def recurrent(op: str) -> ir.Model:
    """Return a net of one recurrent layer whose weights are inputs."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[op] * WIDTH
    reset = ", linear_before_reset = 1" if op == "GRU" else ""
    return ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[{STEPS},{BATCH},{WIDTH}] x, float[1,{gates},{WIDTH}] w,
             float[1,{gates},{WIDTH}] r, float[1,{2 * gates}] b) => (float sum) {{
          y = {op} <hidden_size = {WIDTH}{reset}> (x, w, r, b)
          sum = ReduceSum <keepdims = 0> (y)
        }}
        """
    )


def attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {a.name: a for a in node.attribute}


@pytest.mark.parametrize("op", ["GRU", "LSTM", "RNN"])
def test_backward_body_recomputes_nothing_and_has_no_weight_gradients(op: str) -> None:
    model = onnxtrain.grad(recurrent(op), wrt=["x", "r"])
    scans = [n for n in model.graph.node if n.op_type == "Scan"]
    assert len(scans) == 2
    body = attributes(scans[1])["body"].g.node
    kinds = [n.op_type for n in body]
    assert not {"MatMul", "Sigmoid", "Tanh"}.intersection(kinds)
    # One Gemm remains: from the gates back to the state.
    gemms = [n for n in body if n.op_type == "Gemm"]
    assert len(gemms) == 1
    assert "transA" not in attributes(gemms[0])


def test_constants_in_a_body_have_no_gradient() -> None:
    model = onnxtrain.grad(recurrent("GRU"), wrt=["x"])
    backward = [n for n in model.graph.node if n.op_type == "Scan"][1]
    carried = len(backward.input) - attributes(backward)["num_scan_inputs"].i
    assert carried == 1  # the state; neither the 1 of (1 - z) nor the weights
