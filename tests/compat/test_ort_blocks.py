"""onnxblock: every block against numpy, the contexts, forward and training blocks."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.compat.ort import onnxblock
from onnxtrain.compat.ort.onnxblock import blocks
from tests.compat.models import WEIGHTS, arrays_of, batch, mlp, model_of

X = np.array([[0.5, -1.0, 2.0], [3.0, 0.25, -0.5]], np.float32)
P = np.abs(X) + 0.1

UNARY = {
    "Pow": (lambda: blocks.Pow(3.0), X, X**3),
    "ReduceMean": (blocks.ReduceMean, X, X.mean(keepdims=True)),
    "ReduceMean-flat": (lambda: blocks.ReduceMean(keepdims=False), X, X.mean()),
    "ReduceSum": (lambda: blocks.ReduceSum(keepdims=False), X, X.sum()),
    "Sigmoid": (blocks.Sigmoid, X, 1 / (1 + np.exp(-X))),
    "Log": (blocks.Log, P, np.log(P)),
    "Neg": (blocks.Neg, X, -X),
    "Abs": (blocks.Abs, X, np.abs(X)),
    "Clip": (lambda: blocks.Clip(-0.5, 1.0), X, X.clip(-0.5, 1.0)),
    "Clip-below": (lambda: blocks.Clip(clip_min=0.0), X, X.clip(0)),
    "Cast": (lambda: blocks.Cast(onnx.TensorProto.INT64), X, X.astype(np.int64)),
    "ReduceAllL2": (blocks.ReduceAllL2, X, [np.linalg.norm(X)]),
}


class Wrapped(onnxblock.ForwardBlock):
    """Makes a forward model of a function over names."""

    def __init__(self, build):
        super().__init__()
        self._build = build

    def build(self, *names):
        return self._build(*names)


def run(build, *arrays, opset=None):
    """Return what ``build(*names)`` computes on an otherwise empty model."""
    block = Wrapped(build)
    with onnxblock.empty_base(opset) as accessor:
        for i, array in enumerate(arrays):
            value = accessor.model.graph.input.add(name=f"x{i}")
            value.type.tensor_type.elem_type = int(ir.DataType.from_numpy(array.dtype))
            for size in array.shape:
                value.type.tensor_type.shape.dim.add(dim_value=size)
        name = block(*(f"x{i}" for i in range(len(arrays))))
    model = block.to_model_proto()
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    return session.run([name], feeds)[0]


@pytest.mark.parametrize("opset", [None, 13])
@pytest.mark.parametrize("case", UNARY)
def test_blocks_with_one_input(case, opset):
    make, x, expected = UNARY[case]
    actual = run(make(), x, opset=opset)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual.shape == np.shape(expected)


@pytest.mark.parametrize(
    ("name", "expected"), [("Add", X + P), ("Sub", X - P), ("Mul", X * P), ("Div", X / P)]
)
def test_blocks_with_two_inputs(name, expected):
    np.testing.assert_allclose(run(getattr(blocks, name)(), X, P), expected, rtol=1e-6)


def test_constant_is_a_float_of_shape_one():
    actual = run(lambda x: blocks.Mul()(x, blocks.Constant(0.25)()), X)
    np.testing.assert_allclose(actual, X * 0.25)


def test_norm_of_several_tensors():
    expected = np.sqrt((X**2).sum() + (P**2).sum())
    np.testing.assert_allclose(run(blocks.ReduceAllL2(), X, P), [expected], rtol=1e-6)


def test_sequence_construct():
    outputs = run(blocks.SequenceConstruct(), X, P)
    for a, b in zip(outputs, (X, P), strict=True):
        np.testing.assert_array_equal(a, b)


def test_label_encoder():
    encoder = blocks.LabelEncoder(default_int64=-7, keys_int64s=[1, 2], values_int64s=[10, 20])
    np.testing.assert_array_equal(run(encoder, np.array([2, 1, 3])), [20, 10, -7])


def test_linear():
    np.random.seed(3)
    weight, bias = np.random.randn(3, 4), np.random.randn(4)
    np.random.seed(3)
    actual = run(blocks.Linear(3, 4, alpha=2.0, beta=0.5), X)
    np.testing.assert_allclose(actual, 2 * X @ weight + 0.5 * bias, rtol=1e-4)


def test_pass_through_and_input_like():
    class Block(onnxblock.ForwardBlock):
        def build(self, name):
            assert blocks.PassThrough()(name, name) == (name, name)
            other = blocks.InputLike(name)()
            with pytest.raises(LookupError, match="nothing"):
                blocks.InputLike("nothing")("new")
            return blocks.Add()(name, other)

    block = Block()
    model = mlp()
    with onnxblock.base(model):
        block("output")
    made = block.to_model_proto()
    assert len(made.graph.input) == 2
    assert made.graph.input[1].type == model.graph.output[0].type


def test_an_unknown_name_is_a_lookup_error():
    with onnxblock.base(mlp()), pytest.raises(LookupError, match="nothing is not a graph value"):
        blocks.Add()("output", "nothing")


def test_contexts_do_not_nest_and_end_cleanly(tmp_path):
    with onnxblock.base(mlp()), pytest.raises(RuntimeError, match="already exists"):
        onnxblock.empty_base().__enter__()
    with pytest.raises(RuntimeError, match="cannot be None"):
        onnxblock.base(None).__enter__()
    with pytest.raises(RuntimeError, match="not set"):
        blocks.Neg()("output")
    with pytest.raises(RuntimeError, match="does not exist"):
        onnxblock.custom_op_library(tmp_path / "no.so").__enter__()
    with onnxblock.empty_base() as accessor:
        assert not accessor.has_path
        with pytest.raises(RuntimeError, match="path"):
            _ = accessor.path
    with onnxblock.base(mlp(), "model.onnx") as accessor:
        assert accessor.path == "model.onnx"


def test_a_base_is_a_copy_with_stamps_that_runtimes_take():
    model = mlp()
    model.ir_version = onnx.IR_VERSION
    empty = onnx.ModelProto(ir_version=onnx.IR_VERSION)
    empty.opset_import.add(version=onnx.defs.onnx_opset_version())
    for given, opset in ((model, 17), (empty, 21)):
        with onnxblock.base(given) as accessor:
            assert accessor.model.ir_version <= 13
            assert accessor.model.opset_import[0].version == opset
    assert model.ir_version == onnx.IR_VERSION


def test_names_depend_on_the_model_alone():
    made = []
    for _ in range(2):
        block = Wrapped(onnxblock.loss.MSELoss())
        with onnxblock.base(mlp()):
            block("output")
        made.append(block.to_model_proto().SerializeToString())
    assert made[0] == made[1]


def test_a_second_block_on_the_result_of_the_first_gets_new_names():
    first = Wrapped(blocks.Neg())
    with onnxblock.base(mlp()):
        name = first("output")
    second = Wrapped(blocks.Neg())
    with onnxblock.base(first.to_model_proto()):
        assert second(name) != name
    onnx.checker.check_model(second.to_model_proto(), full_check=True)


def test_blocks_may_append_nodes_of_their_own():
    class Own(onnxblock.ForwardBlock):
        def build(self, name):
            self.base.graph.node.add(op_type="Tanh", input=[name], output=["tanh"])
            return blocks.Neg()("tanh")

    block = Own()
    with onnxblock.base(mlp()):
        block("output")
    assert [n.op_type for n in block.to_model_proto().graph.node][-2:] == ["Tanh", "Neg"]


def test_models_before_they_are_built():
    class Loss(onnxblock.TrainingBlock):
        def build(self, name):
            return onnxblock.loss.MSELoss()(name)

    with pytest.raises(RuntimeError, match="before trying to retrieve the parameters"):
        Loss().parameters()
    with pytest.raises(RuntimeError, match="training and eval models first"):
        Loss().to_model_proto()
    with pytest.raises(RuntimeError, match="forward models first"):
        Wrapped(blocks.Neg()).to_model_proto()
    with pytest.raises(RuntimeError, match="relative path"):
        blocks.Block.__init__(blocks.Neg(), "/temp.onnx")
    with pytest.raises(RuntimeError, match="Reduction some not supported"):
        onnxblock.loss.L1Loss(reduction="some")


class NoInit(onnxblock.TrainingBlock):
    """A training block that never calls ``super().__init__()``."""

    def __init__(self):
        self.loss = onnxblock.loss.CrossEntropyLoss()

    def build(self, name):
        return self.loss(name)


def test_training_block_gives_models_and_parameters(tmp_path):
    block = NoInit()
    for name in WEIGHTS:
        block.requires_grad(name, name != "fc1.bias")
    with onnxblock.base(mlp()):
        loss = block("output")
    trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["fc1.weight", "fc2.weight", "fc2.bias"]
    assert [t.name for t in frozen] == ["fc1.bias"]
    training, evaluation = block.to_model_proto()
    assert training.graph.output[0].name == evaluation.graph.output[0].name == loss

    x, labels = batch()
    feeds = {"input": x, "labels": labels, **arrays_of(mlp())}
    session = ort.InferenceSession(evaluation.SerializeToString())
    expected = session.run(None, feeds)[0]
    for t in trainable:
        feeds[f"{t.name}_grad.accumulation.buffer"] = np.ones(t.dims, np.float32)
    gradients = {}
    for reset in (True, False):
        feeds["lazy_reset_grad"] = np.array([reset])
        session = ort.InferenceSession(training.SerializeToString())
        value, *gradients[reset] = session.run(None, feeds)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    for fresh, summed in zip(gradients[True], gradients[False], strict=True):
        np.testing.assert_allclose(fresh + 1, summed, rtol=1e-5, atol=1e-6)

    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    model = mlp()
    for tensor in model.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    for name, array in arrays_of(mlp()).items():
        np.testing.assert_array_equal(arrays_of(model)[name], array)
    with pytest.raises(RuntimeError, match="No checkpoint parameters"):
        onnxblock.save_checkpoint(None, tmp_path / "none")


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    block = NoInit()
    block.requires_grad("fc1.weight")
    with onnxblock.base(mlp()):
        block("output")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match=r"fc1\.weight has shape"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", mlp(features=9))


def test_targets_with_a_name_in_use_are_shared():
    class Twice(onnxblock.ForwardBlock):
        def build(self, name):
            loss = onnxblock.loss.MSELoss()
            return blocks.Add()(loss(name), onnxblock.loss.L1Loss()(name))

    model = model_of({"x": ["n", 2]}, {}, lambda op, x: {"y": op.Neg(x)})
    block = Twice()
    with onnxblock.base(model):
        name = block("y")
    made = block.to_model_proto()
    assert [x.name for x in made.graph.input] == ["x", "target"]
    x, t = X[:, :2], P[:, :2]
    actual = ort.InferenceSession(made.SerializeToString()).run([name], {"x": x, "target": t})[0]
    np.testing.assert_allclose(actual, ((x + t) ** 2).mean() + np.abs(x + t).mean(), rtol=1e-5)
