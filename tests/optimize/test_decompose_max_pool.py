"""MaxPool of opset 22 on CUDA is decomposed: values and gradients stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optimize.pipeline import AFTER, run
from tests.cases.evaluate import stock

CASES: dict[str, tuple[list, dict[str, Any]]] = {
    "overlapping": ([2, 3, 9, 8], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "side by side": ([2, 2, 6, 6], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "one axis": ([2, 3, 11], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    "dilated": ([1, 2, 9, 9], {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 2, 0, 1]}),
    "free batch": (["n", 2, 7, 7], {"kernel_shape": [3, 3], "strides": [2, 2]}),
}


def gradient(shape: list, attributes: dict[str, Any], opset: int, target: str) -> onnx.ModelProto:
    """Return result and gradient, by the forms of a target."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="pool")
    op = OpBuilder(graph, "grad/", target=target)
    x = op.input("x", ir.DataType.FLOAT, shape)
    y = op.MaxPool(x, **attributes)
    dy = op.input("dy", ir.DataType.FLOAT, list(y.shape or ()))
    dx = differentiate(op, {y: dy}, [x])[x]
    assert dx is not None
    graph.outputs.extend([op.Neg(y), op.Neg(dx)])
    model = ir.Model(graph, ir_version=10)
    run(AFTER, model, op)
    return ir.to_proto(model)


def numbers(shape: list) -> np.ndarray:
    """Many equal ones."""
    sizes = [2 if d == "n" else d for d in shape]
    return np.random.default_rng(0).integers(-2, 3, sizes).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_operator(name: str) -> None:
    operator, composed = (gradient(*CASES[name], *how) for how in ((21, "cpu"), (22, "cuda")))
    assert "MaxPool" in {n.op_type for n in operator.graph.node}
    assert "MaxPool" not in {n.op_type for n in composed.graph.node}
    x = numbers(CASES[name][0])
    dy = np.random.default_rng(1).standard_normal(shape_of_result(name, x)).astype(np.float32)
    for ours, theirs in zip(stock(composed)([x, dy]), stock(operator)([x, dy]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def shape_of_result(name: str, x: np.ndarray) -> tuple[int, ...]:
    options = CASES[name][1]
    rank = x.ndim - 2
    kernel, strides = options["kernel_shape"], options.get("strides", [1] * rank)
    pads, dilations = options.get("pads", [0] * 2 * rank), options.get("dilations", [1] * rank)
    sizes = [
        (size + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i, size in enumerate(x.shape[2:])
    ]
    return *x.shape[:2], *sizes


def test_windows_without_a_finite_maximum() -> None:
    composed = gradient(*CASES["overlapping"], 22, "cuda")
    x = np.full(CASES["overlapping"][0], -np.inf, np.float32)
    dy = np.ones(shape_of_result("overlapping", x), np.float32)
    y, dx = stock(composed)([x, dy])
    assert (y == np.inf).all()  # negated
    assert -dx.sum() == dy.size


def test_older_files_keep_the_operator() -> None:
    model = gradient(*CASES["overlapping"], 21, "cuda")
    assert "MaxPool" in {n.op_type for n in model.graph.node}
