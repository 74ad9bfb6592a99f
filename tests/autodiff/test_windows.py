"""Convolution, pooling and Einsum: refusals, and the gradient of norms at zero."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.autodiff.rules.linalg import einsum
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.dims import expand_equation
from tests.cases.evaluate import stock

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
UNKNOWN_KERNELS = {
    "auto_pad of 'x' requires a static kernel size": """
        g (float[N,2,H,W] x, float[3,2,K,L] w) => (float[N,3,A,B] y) {
            y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w)
        }""",
    "padding of node 'n' requires a static kernel size": """
        g (float[N,2,H,W] x, float[2,3,K,L] w) => (float[N,3,9,9] y) {
            [n] y = ConvTranspose <output_shape = [9, 9], strides = [2, 2]> (x, w)
        }""",
    "no gradient for node 'n': only two spatial axes and a static kernel size": """
        g (float[N,2,H,W] x, float[3,2,K,L] w, float[N,M,A,B] offset) => (float[N,3,A,B] y) {
            [n] y = DeformConv (x, w, offset)
        }""",
}


@pytest.mark.parametrize("message", UNKNOWN_KERNELS)
def test_unknown_kernel_size_is_refused(message: str) -> None:
    model = onnx.parser.parse_model(HEADER + UNKNOWN_KERNELS[message])
    with pytest.raises(UndifferentiableError, match=message):
        onnxtrain.vjp(model, ["x", "w"])


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(
    "node", ["LpPool <kernel_shape = [2, 2], strides = [2, 2], p = {p}>", "GlobalLpPool <p = {p}>"]
)
def test_gradient_of_lp_pool_is_zero_at_zero(node: str, p: int) -> None:
    text = f"g (float[1,1,2,2] x) => (float[1,1,1,1] y) {{ y = {node.format(p=p)} (x) }}"
    model = onnx.parser.parse_model(HEADER + text)
    run = stock(onnxtrain.vjp(model, ["x"]))
    y, dx = run([np.zeros((1, 1, 2, 2)), np.ones((1, 1, 1, 1))])
    assert y.item() == 0
    assert np.array_equal(dx, np.zeros((1, 1, 2, 2)))


@pytest.mark.parametrize(
    ("equation", "ranks"),
    [("ij,jk", [2]), ("ij->i", [3]), ("ijk->i", [2]), ("ij->ii", [2]), ("ij->k", [2])],
)
def test_invalid_equation_is_not_expanded(equation: str, ranks: list[int]) -> None:
    assert expand_equation(equation, ranks) is None


def test_einsum_with_an_invalid_equation_is_refused() -> None:
    x, dy = (ir.val(name, ir.DataType.FLOAT, [2, 3]) for name in ("x", "dy"))
    node = ir.node("Einsum", [x], {"equation": "ij->i"}, name="n")
    op = OpBuilder(ir.Graph([x, dy], [], nodes=[], opset_imports={"": 21}, name="g"))
    with pytest.raises(UndifferentiableError, match="equation 'ij->i' of node 'n' does not fit"):
        einsum(op, dy, x, equation="ij->i", node=node)
