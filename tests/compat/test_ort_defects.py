"""Calls that onnxruntime-training 1.19.2 fails on, and that must simply work."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxtrain.compat.ort import artifacts, onnxblock
from onnxtrain.compat.ort.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from tests.compat.models import WEIGHTS, arrays_of, batch, mlp, model_of

REFERENCE = {
    onnxblock.loss.MSELoss: F.mse_loss,
    onnxblock.loss.L1Loss: F.l1_loss,
    onnxblock.loss.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}


def loss_model(block: onnxblock.Block, model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    class Forward(onnxblock.ForwardBlock):
        def build(self, name):
            return block(name)

    forward = Forward()
    with onnxblock.base(model):
        name = forward(model.graph.output[0].name)
    return forward.to_model_proto(), name


def identity(*dims) -> onnx.ModelProto:
    return model_of({"x": dims}, {}, lambda op, x: {"y": op.Identity(x)})


def run(model: onnx.ModelProto, name: str, *arrays: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString())
    feeds = dict(zip((x.name for x in session.get_inputs()), arrays, strict=True))
    return session.run([name], feeds)[0]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", REFERENCE)
def test_every_reduction_of_every_loss(kind, reduction):
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 3)).astype(np.float32), rng.random((4, 3)).astype(np.float32)
    actual = run(*loss_model(kind(reduction=reduction), identity("batch", 3)), x, t)
    expected = REFERENCE[kind](torch.tensor(x), torch.tensor(t), reduction=reduction)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_an_unreduced_loss_trains_as_its_sum(tmp_path):
    gradients = []
    for reduction in ("none", "sum"):
        (tmp_path / reduction).mkdir()
        artifacts.generate_artifacts(
            mlp(),
            requires_grad=WEIGHTS,
            artifact_directory=tmp_path / reduction,
            loss=onnxblock.loss.CrossEntropyLoss(reduction=reduction),
        )
        state = CheckpointState.load_checkpoint(tmp_path / reduction / "checkpoint")
        loss = Module(tmp_path / reduction / "training_model.onnx", state)(*batch())
        assert loss.shape == ((8,) if reduction == "none" else ())
        gradients.append([p.grad for _, p in state.parameters])
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bce_with_logits_is_stable_and_takes_weights():
    x = np.array([[-200.0, 200.0, 3.0]], np.float32)
    t = np.array([[1.0, 0.0, 1.0]], np.float32)
    weight, positive = np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 0.5])
    block = onnxblock.loss.BCEWithLogitsLoss(weight=weight, pos_weight=positive)
    expected = F.binary_cross_entropy_with_logits(
        torch.tensor(x), torch.tensor(t), torch.tensor(weight), pos_weight=torch.tensor(positive)
    )
    actual = run(*loss_model(block, identity("batch", 3)), x, t)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_with_class_weights_and_ignore_index(reduction):
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((6, 4)).astype(np.float32), np.array([0, 1, 2, 3, 1, 0])
    weight = np.array([1.0, 2.0, 0.5, 4.0], np.float32)
    block = onnxblock.loss.CrossEntropyLoss(weight=weight, reduction=reduction, ignore_index=1)
    actual = run(*loss_model(block, identity("batch", 4)), x, labels)
    expected = F.cross_entropy(
        torch.tensor(x),
        torch.tensor(labels),
        torch.tensor(weight),
        reduction=reduction,
        ignore_index=1,
    )
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("dims", [("batch", "sequence", 5), ("batch", 7, 5)])
def test_language_model_logits_have_their_classes_last(dims):
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((2, 7, 5)).astype(np.float32), rng.integers(0, 5, (2, 7))
    actual = run(*loss_model(onnxblock.loss.CrossEntropyLoss(), identity(*dims)), x, labels)
    expected = F.cross_entropy(torch.tensor(x).transpose(1, 2), torch.tensor(labels))
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5)


class _Segmentation(onnxblock.ForwardBlock):
    """Labels of one's own, which leave out axis 1 as in torch."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def build(self, name):
        value = self.base.graph.input.add(name="mask")
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
        for size in self.sizes:
            dim = value.type.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
        return onnxblock.loss.CrossEntropyLoss()(name, labels_name="mask")


@pytest.mark.parametrize("sizes", [("batch", 6, 7), ("batch", "height", 7)])
def test_labels_of_an_image_leave_out_axis_1(sizes):
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((2, 5, 6, 7)).astype(np.float32), rng.integers(0, 5, (2, 6, 7))
    model = identity("batch", 5, *sizes[1:])
    block = _Segmentation(*sizes)
    with onnxblock.base(model):
        name = block("y")
    actual = run(block.to_model_proto(), name, x, labels)
    expected = F.cross_entropy(torch.tensor(x), torch.tensor(labels))
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5)


def test_labels_that_fit_both_axes_are_refused():
    model = identity("batch", 5, 5)
    with onnxblock.base(model), pytest.raises(RuntimeError, match="both on axis 1 and on the last"):
        _Segmentation("batch", 5)("y")


def batch_norm() -> onnx.ModelProto:
    def build(op, x, scale, bias, mean, var, head):
        y, *_ = op.BatchNormalization(x, scale, bias, mean, var, training_mode=1, _outputs=3)
        return {"output": op.Gemm(y, head)}

    weights = {"scale": [6], "bias": [6], "mean": [6], "var": [6], "head": [6, 3]}
    model = model_of({"input": ["batch", 6]}, weights, build)
    for tensor in model.graph.initializer:
        if tensor.name == "var":
            tensor.raw_data = np.ones(6, np.float32).tobytes()
    return model


@pytest.mark.parametrize("frozen", [None, ["mean", "var"]])
def test_batch_norm_evaluates_on_statistics_that_training_updates(tmp_path, frozen):
    artifacts.generate_artifacts(
        batch_norm(),
        requires_grad=["scale", "bias", "head"],
        frozen_params=frozen,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
        additional_output_names=["output"],
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert len(state.parameters) == (3 if frozen is None else 5)
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    norm = torch.nn.BatchNorm1d(6, momentum=0.1)
    start = arrays_of(batch_norm())
    with torch.no_grad():
        for name, value in (("weight", "scale"), ("bias", "bias"), ("running_mean", "mean")):
            getattr(norm, name).copy_(torch.tensor(start[value]))
    for seed in range(3):
        x, labels = batch(seed=seed)
        module(x, labels)
        norm(torch.tensor(x))
    module.eval()
    _, output = module(x, labels)
    expected = norm.eval()(torch.tensor(x)).detach().numpy() @ start["head"]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)

    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    again = CheckpointState.load_checkpoint(tmp_path / "saved")
    module = Module(tmp_path / "training_model.onnx", again, tmp_path / "eval_model.onnx").eval()
    np.testing.assert_array_equal(module(x, labels)[1], output)


@pytest.fixture
def module(tmp_path):
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=WEIGHTS,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    return Module(tmp_path / "training_model.onnx", state)


def test_evaluation_without_an_evaluation_model_is_an_error(module):
    module.eval()
    for call in (lambda: module(*batch()), module.input_names, module.output_names):
        with pytest.raises(RuntimeError, match="no evaluation model"):
            call()
    with pytest.raises(RuntimeError, match="no evaluation model"):
        module.export_model_for_inferencing("nowhere.onnx", ["output"])


def test_parameters_can_be_set_before_there_is_a_module(tmp_path, module):
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    state.parameters["fc2.bias"].data = np.array([5.0, 0.0, 0.0], np.float32)
    x, _ = batch()
    other = Module(tmp_path / "training_model.onnx", state)
    assert other(x, np.zeros(8, np.int64)) < module(x, np.zeros(8, np.int64))


@pytest.mark.parametrize(
    ("warmup", "total", "expected"),
    [
        (2, 6, [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        (0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        (3, 3, [0, 1 / 3, 2 / 3, 0, 0]),
    ],
)
def test_warm_up_and_total_are_the_right_way_round(tmp_path, module, warmup, total, expected):
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, warmup, total, 1.0)
    actual = [optimizer.get_learning_rate()]
    for _ in expected[1:]:
        module(*batch())
        optimizer.step()
        scheduler.step()
        actual.append(optimizer.get_learning_rate())
    np.testing.assert_allclose(actual, expected, atol=1e-7)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_the_learning_rate_is_in_the_checkpoint(tmp_path, module, with_optimizer):
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    module(*batch())
    optimizer.step()
    optimizer.set_learning_rate(0.125)
    CheckpointState.save_checkpoint(module._state, tmp_path / "saved", with_optimizer)
    state = CheckpointState.load_checkpoint(tmp_path / "saved")
    again = Optimizer(
        tmp_path / "optimizer_model.onnx", Module(tmp_path / "training_model.onnx", state)
    )
    assert again.get_learning_rate() == 0.125
