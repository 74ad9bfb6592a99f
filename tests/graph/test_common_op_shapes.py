"""The formulas for common operators agree with onnx's and symbolic inference, or do not apply."""

from __future__ import annotations

import itertools

import onnx_ir as ir
import pytest

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import inference as quick

SHAPES = [(), (3,), ("n",), (1, 3), ("n", 1), ("n", 3), ("m", "n"), (2, 3, "n"), ("n", 3, 3)]
UNARY = [*quick._SAME_SHAPE, "Softmax", "LogSoftmax", "Transpose"]
BINARY = [*quick._ARITHMETIC, *quick._COMPARISONS, "MatMul"]


def node(op_type: str, shapes: tuple, kinds: tuple[ir.DataType, ...]) -> ir.Node:
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(k), shape=ir.Shape(list(s)))
        for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))
    ]
    made = ir.Node("", op_type, inputs, num_outputs=1, name="node", version=21)
    made.outputs[0].name = "y"
    return made


def slow(made: ir.Node, monkeypatch: pytest.MonkeyPatch) -> tuple | None:
    with monkeypatch.context() as patch:
        patch.setattr(quick, "infer_common_op", lambda node: False)
        try:
            S.infer_node(made, 21)
        except PrepareError:
            return None
    y = made.outputs[0]
    return y.dtype, S.dims_of(y)


@pytest.mark.parametrize("op_type", [*UNARY, *BINARY, "Where"])
def test_agreement(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1 if op_type in UNARY else 3 if op_type == "Where" else 2
    chosen = SHAPES if count < 3 else SHAPES[:5]
    float_ = ir.DataType.FLOAT
    kinds = ((ir.DataType.BOOL,) if count == 3 else ()) + (float_,) * min(count, 2)
    certain = 0
    for shapes in itertools.product(chosen, repeat=count):
        made = node(op_type, shapes, kinds)
        if quick.infer_common_op(made):
            certain += 1
            actual = made.outputs[0].dtype, S.dims_of(made.outputs[0])
            assert actual == slow(node(op_type, shapes, kinds), monkeypatch), shapes
    assert certain > len(chosen) // 2


@pytest.mark.parametrize("kinds", [("FLOAT", "DOUBLE"), ("INT64", "INT64"), ("FLOAT", "INT64")])
def test_other_types_are_left_to_onnx(kinds: tuple[str, str]) -> None:
    assert not quick.infer_common_op(
        node("Add", ((2,), (2,)), tuple(ir.DataType[k] for k in kinds))
    )


def test_incompatible_shapes_raise() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    a, b = (op.input(n, ir.DataType.FLOAT, s) for n, s in (("a", [2, 3]), ("b", [2, 4])))
    for op_type in ("Add", "MatMul"):
        with pytest.raises(PrepareError, match="incompatible shapes"):
            op.emit(op_type, a, b)
