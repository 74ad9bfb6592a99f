"""Comparisons and Where in a runtime without them and without Cast; exact for every float."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.lower import lower

from .single import OPSETS, everything_but, op_types, run

FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
LACKS = (
    *("And", "Cast", "Equal", "Expand", "Greater", "GreaterOrEqual", "If", "IsInf", "IsNaN"),
    *("Less", "LessOrEqual", "Not", "Or", "Sign", "Where", "Xor"),
)
EXTREME = np.asarray([-np.inf, -1e38, -1, -1e-45, 0, 1e-45, 1, 1e38, np.inf, np.nan], np.float32)
PAIRS = [a.ravel() for a in np.meshgrid(EXTREME, EXTREME)]
WHOLE = [a.ravel() for a in np.meshgrid(*[np.asarray([-(1 << 29), -2, -1, 0, 1, 2, 1 << 29])] * 2)]


def _floats(op: OpBuilder, x: ir.Value) -> ir.Value:
    return x if x.dtype == FLOAT else op.Gather(op.const(np.zeros(1), FLOAT), op.Sub(x, x))


MASKS = {
    "Greater": lambda op, a, b: op.Greater(a, b),
    "Less": lambda op, a, b: op.Less(a, b),
    "GreaterOrEqual": lambda op, a, b: op.GreaterOrEqual(a, b),
    "LessOrEqual": lambda op, a, b: op.LessOrEqual(a, b),
    "Equal": lambda op, a, b: op.Equal(a, b),
    "Not": lambda op, a, b: op.Not(op.Greater(a, b)),
    "And": lambda op, a, b: op.And(op.Greater(a, b), op.Less(a, op.const(1, a.dtype))),
    "Or": lambda op, a, b: op.Or(op.Greater(a, b), op.Equal(a, op.const(1, a.dtype))),
    "Xor": lambda op, a, b: op.Xor(op.Greater(a, b), op.Less(b, op.const(1, a.dtype))),
    "same": lambda op, a, b: op.Equal(op.Greater(a, b), op.Less(b, op.const(1, a.dtype))),
    "finite": lambda op, a, b: op.Greater(op.Tanh(_floats(op, a)), op.Tanh(_floats(op, b))),
    "nonzero": lambda op, a, b: op.Cast(a, to=BOOL),
    "moved": lambda op, a, b: op.Reshape(
        op.Transpose(op.Reshape(op.Greater(a, b), [-1, 1]), perm=[1, 0]), [-1]
    ),
    "joined": lambda op, a, b: op.Slice(
        op.Concat(op.Less(a, b), op.Greater(a, b), axis=0), [0], list(op.dims(a)), [0]
    ),
    "constant": lambda op, a, b: op.And(op.Less(a, b), op.const(np.arange(op.dims(a)[0]) % 2 > 0)),
}


def model(mask, dtype: ir.DataType, count: int) -> onnx.ModelProto:
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    a, b = (op.input(n, dtype, [count]) for n in "ab")
    hit = mask(op, a, b)
    values = {"number": op.Cast(hit, to=FLOAT), "chosen": op.Where(hit, a, b)}
    for name, y in values.items():
        y.name = name
        op.graph.outputs.append(y)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", MASKS)
def test_float_comparisons(name: str, opset: int):
    _same(name, FLOAT, PAIRS, opset)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", MASKS)
def test_integer_comparisons(name: str, opset: int):
    _same(name, INT64, WHOLE, opset)


@pytest.mark.parametrize("kind", ["IsNaN", "IsInf"])
def test_is_nan_and_is_inf(kind: str):
    _same(kind, FLOAT, PAIRS, 7, lambda op, a, b: op.emit(kind, a))


def _same(name: str, dtype: ir.DataType, values: list[np.ndarray], opset: int, mask=None) -> None:
    original = model(mask or MASKS[name], dtype, len(values[0]))
    lowered = lower(original, everything_but(*LACKS), opset=opset, verify=False)
    assert not op_types(lowered) & set(LACKS)
    feeds = dict(zip("ab", values, strict=True))
    with np.errstate(all="ignore"):
        for x, y in zip(run(original, feeds), run(lowered, feeds), strict=True):
            np.testing.assert_array_equal(y, x)
