"""maxpool_indices: computed positions equal the operator's Indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optimize.pipeline import AFTER, run
from tests.cases.evaluate import stock


def _model(shape: list, dtype: ir.DataType = ir.DataType.FLOAT, **attrs: Any) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="pool")
    op = OpBuilder(graph, "pool/")
    y, indices = op.MaxPool(op.input("x", dtype, shape), _outputs=2, **attrs)
    graph.outputs.extend([op.Neg(y), op.Neg(indices)])
    return ir.Model(graph, ir_version=10)


def _spell(model: ir.Model, target: str = "cpu") -> int:
    return run(AFTER, model, OpBuilder(model.graph, "grad/", target=target))


def _ties(shape: list[int]) -> np.ndarray:
    """Few different numbers, infinities of both kinds, and windows of nothing else."""
    x = np.random.default_rng(0).integers(-2, 3, shape).astype(np.float64)
    x[0, 0], x[-1, -1], x[0, 1, :2] = -np.inf, np.inf, -np.inf
    x[-1, 0, ::3, ::2] = -np.inf
    return x


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        pytest.param([3, 2, 6, 8], [2, 2], id="small"),
        pytest.param([2, 16, 24, 24], [2, 2], id="blocks"),
        pytest.param(["n", 3, 6, 4], [3, 2], id="symbolic-batch"),
        pytest.param([2, 3, 4, 6], [1, 3], id="rows"),
        pytest.param([2, 2, 4, 4], [4, 4], id="one-window"),
    ],
)
def test_positions_are_those_of_the_operator(shape: list, kernel: list[int]) -> None:
    model = _model(shape, kernel_shape=kernel, strides=kernel)
    operator = stock(ir.to_proto(model))
    assert _spell(model) == 1
    spelled = stock(ir.to_proto(model))
    for batch in (1, 4) if shape[0] == "n" else (shape[0],):
        x = _ties([batch, *shape[1:]])
        np.testing.assert_array_equal(spelled([x])[1], operator([x])[1])
        finite = np.clip(x, -9, 9)
        for ours, theirs in zip(spelled([finite]), operator([finite]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "attrs"),
    [
        pytest.param([2, 3, 5, 4], {"strides": [2, 2]}, id="remainder"),
        pytest.param([2, 3, 6, 6], {"strides": [1, 2]}, id="overlap"),
        pytest.param([2, 3, 6, 6], {"strides": [2, 2], "pads": [1, 1, 1, 1]}, id="padded"),
        pytest.param([2, 3, 6, 6], {"strides": [2, 2], "dilations": [2, 2]}, id="dilated"),
        pytest.param([2, 3, 6, 6], {"strides": [2, 2], "storage_order": 1}, id="by-columns"),
        pytest.param([2, 3, "h", 6], {"strides": [2, 2]}, id="unknown-size"),
    ],
)
def test_other_poolings_keep_the_operator(shape: list, attrs: dict) -> None:
    assert _spell(_model(shape, kernel_shape=[2, 2], **attrs)) == 0


def test_other_types_and_targets_keep_the_operator() -> None:
    attrs: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    assert _spell(_model([2, 3, 4, 4], ir.DataType.DOUBLE, **attrs)) == 0
    model = _model([2, 3, 4, 4], **attrs)
    assert [_spell(model, t) for t in ("cuda", "wasm", "webgpu", "portable")] == [0] * 4
