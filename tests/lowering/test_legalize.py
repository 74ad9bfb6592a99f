"""Lower types and ranks that a runtime lacks, in several adjacent nodes."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.errors import LoweringError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.lower import lower

from .single import everything_but, run

FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
SHAPE = {"any_dtype": [1]}
NO_LONG = dataclasses.replace(
    everything_but(
        Cast={"dtypes": ["float", "int32", "int64", "bool"]},
        Reshape=SHAPE,
        Slice={"any_dtype": [1, 2, 3]},
        ReduceMax=SHAPE,
        ReduceSum=SHAPE,
        Squeeze=SHAPE,
        Unsqueeze=SHAPE,
    ),
    name="no int64",
    dtypes={"*": ["float", "int32", "bool"]},
)
NO_BOOL = dataclasses.replace(
    everything_but(
        Greater={"dtypes": ["float", "bool"]},
        Less={"dtypes": ["float", "bool"]},
        Where={"dtypes": ["float", "bool"]},
        Cast={"dtypes": ["float", "int64", "bool"]},
        Reshape=SHAPE,
        Slice={"any_dtype": [1, 2, 3]},
    ),
    name="no bool",
    dtypes={"*": ["float", "int64"]},
)
FLAT = dataclasses.replace(everything_but(), name="flat", max_rank={"*": 4})


def model(make, *inputs: tuple[ir.DataType, list[int]]) -> onnx.ModelProto:
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"))
    values = [op.input(f"x{i}", *type_and_shape) for i, type_and_shape in enumerate(inputs)]
    y = make(op, *values)
    y.name = "y"
    op.graph.outputs.append(y)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def draw(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), {}
    for x in proto.graph.input:
        tensor_type = x.type.tensor_type
        shape = [d.dim_value for d in tensor_type.shape.dim]
        if tensor_type.elem_type == INT64:
            feeds[x.name] = rng.integers(-3, 3, shape)
        else:
            feeds[x.name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def check(proto: onnx.ModelProto, profile, opset: int) -> onnx.ModelProto:
    lowered = lower(proto, profile, opset=opset)
    for a, b in zip(run(proto, draw(proto)), run(lowered, draw(proto)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    return lowered


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_int64_becomes_int32(opset: int):
    proto = model(
        lambda op, x, i: op.Gather(x, op.Mul(op.Abs(op.Add(op.Neg(i), op.const(1))), op.const(2))),
        (FLOAT, [9, 2]),
        (INT64, [4]),
    )
    lowered = check(proto, NO_LONG, opset)
    kinds = [n.op_type for n in lowered.graph.node]
    assert kinds == [
        "Cast",
        "Neg",
        "Add",
        "Abs",
        "Mul",
        "Gather",
    ]  # only one Cast: the inner pairs cancel


def test_a_runtime_without_casts_of_int64_is_refused():
    proto = model(lambda op, i: op.Cast(op.Add(i, i), to=FLOAT), (INT64, [4]))
    plain = dataclasses.replace(NO_LONG, ops={**NO_LONG.ops, "Cast": {"dtypes": ["float"]}})
    with pytest.raises(LoweringError, match="has no int64 in Cast"):
        lower(proto, plain, opset=13)


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_bool_becomes_int64(opset: int):
    def build(op, a, b):
        up, down = op.Greater(a, 0.0), op.Less(b, 0.5)
        both = op.And(op.Not(up), op.Transpose(op.Reshape(down, [3, 2]), perm=[1, 0]))
        return op.Where(op.Or(both, op.Xor(up, op.Equal(up, both))), a, b)

    lowered = check(model(build, (FLOAT, [2, 3]), (FLOAT, [2, 3])), NO_BOOL, opset)
    kinds = {n.op_type for n in lowered.graph.node}
    assert not kinds & {"And", "Or", "Xor", "Not", "Equal"}


PER_AXIS = ir.tensor(np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4, 1, 1))
HIGH = {
    "depth to space": lambda op, x: op.Transpose(x, perm=[0, 3, 4, 1, 5, 2]),
    "reversed axes": lambda op, x: op.Transpose(x, perm=[5, 4, 3, 2, 1, 0]),
    "elementwise": lambda op, x: op.Relu(op.Neg(x)),
    "clipped": lambda op, x: op.Clip(x, -0.5, 0.5),
    "broadcast": lambda op, x: op.Mul(op.Add(x, op.const(np.ones((2, 3)), FLOAT)), 2.0),
    "per axis": lambda op, x: op.Add(x, op.emit("Constant", value=PER_AXIS)),
    "last axis": lambda op, x: op.Add(x, op.const(np.arange(3), FLOAT)),
    "reduced": lambda op, x: op.ReduceSum(x, [1, 2, 5], keepdims=1),
    "mean": lambda op, x: op.ReduceMean(x, [-1], keepdims=0),
    "softmax": lambda op, x: op.Softmax(x, axis=2),
    "concatenated": lambda op, x: op.Concat(x, x, axis=3),
    "gathered": lambda op, x: op.Gather(x, op.const([[1, 0], [0, 1]]), axis=0),
    "matmul": lambda op, x: op.MatMul(x, op.const(np.ones((3, 5)), FLOAT)),
    "batched": lambda op, x: op.MatMul(x, op.Transpose(x, perm=[0, 1, 2, 3, 5, 4])),
}


@pytest.mark.parametrize("opset", [7, 13, 17])
@pytest.mark.parametrize("name", HIGH)
def test_high_ranks_are_flattened(name: str, opset: int):
    def build(op, x):
        high = op.Reshape(x, [2, 2, 2, 4, 2, 3])
        return op.Reshape(HIGH[name](op, high), [4, -1])

    lowered = check(model(build, (FLOAT, [4, 48])), FLAT, opset)
    inferred = onnx.shape_inference.infer_shapes(lowered)
    values = [*inferred.graph.value_info, *inferred.graph.output]
    assert max(len(v.type.tensor_type.shape.dim) for v in values) <= 4


def test_an_input_of_high_rank_is_refused():
    proto = model(lambda op, x: op.Relu(x), (FLOAT, [1, 2, 1, 2, 2]))
    with pytest.raises(LoweringError, match="flat has no tensors of rank 5 in Reshape"):
        lower(proto, FLAT, opset=13)
