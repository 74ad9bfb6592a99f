"""Distillation: values against torch, training, features, and teachers that fit or do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnxruntime.quantization import QuantType, quantize_dynamic

import onnxtrain
from onnxtrain import Trainer, examples, losses
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from tests.losses.compare import compare

rng = np.random.default_rng(3)


def digits(samples: int = 1200) -> tuple[np.ndarray, np.ndarray]:
    data = examples.digits_data(samples)
    return data["image"], data["labels"]


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm", "webgpu"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_value_and_gradient(target: str, axis: int) -> None:
    def oracle(x: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        theirs, ours = ((y / 3.0).log_softmax(axis) for y in (teacher, x))
        each = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(axis)
        return 9.0 * each.mean()

    shape = (4, 5, 6)
    x, teacher = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    loss = losses.Distillation(temperature=3.0, axis=axis)
    compare(loss, oracle, [x], [teacher], target=target)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained classifier of digits."""
    model = examples.digits_model(hidden=64)
    trainer = Trainer(onnxtrain.build(model, loss="cross_entropy", optimizer="adamw:lr=0.01"))
    x, y = digits()
    trainer.fit(x[:1000], y[:1000], epochs=6, progress=False)
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    trainer.export(path)
    return path


def outputs(model: str | Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(model))
    return session.run(["logits"], {session.get_inputs()[0].name: x})[0]


def test_student_agrees_with_its_teacher(teacher: Path, tmp_path: Path) -> None:
    x, _ = digits()
    artifacts = onnxtrain.distill(
        examples.digits_model(hidden=12), teacher, loss=None, optimizer="adamw:lr=0.02"
    )
    assert {p.name.split(".")[0] for p in artifacts.manifest.parameters} == {"fc1", "fc2"}
    trainer = Trainer(artifacts)
    trainer.fit(x[:1000], epochs=12, progress=False)
    exported = tmp_path / "student.onnx"
    trainer.export(exported)
    ours, theirs = (outputs(m, x[1000:]).argmax(1) for m in (exported, teacher))
    assert (ours == theirs).mean() > 0.9
    assert sum(i.dims[0] * 12 for i in onnx.load(exported).graph.initializer) < 2000


def test_stored_logits_train_alike(teacher: Path, tmp_path: Path) -> None:
    x, y = digits()
    x, y = x[:64], y[:64]
    stored = onnxtrain.teacher_logits(teacher, {"image": x}, tmp_path / "t.npy", batch_size=20)
    np.testing.assert_allclose(stored, outputs(teacher, x), atol=1e-5)
    student = examples.digits_model(hidden=12)
    results = []
    for given in (teacher, None):
        trainer = Trainer(onnxtrain.distill(student, given, weight=0.7, optimizer="sgd:lr=0.1"))
        more = {} if given is not None else {"teacher_logits": np.asarray(stored)}
        results.append([trainer.step(image=x, labels=y, **more).loss for _ in range(5)])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_a_quantized_teacher(teacher: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "int8.onnx"
    quantize_dynamic(teacher, quantized, weight_type=QuantType.QUInt8)
    x, y = digits()
    trainer = Trainer(
        onnxtrain.distill(examples.digits_model(hidden=12), quantized, optimizer="adamw:lr=0.01")
    )
    steps = [trainer.step(x[:64], y[:64]).loss for _ in range(20)]
    assert steps[-1] < 0.8 * steps[0]


def test_features_add_their_squared_error(teacher: Path) -> None:
    relu = next(n.output[0] for n in onnx.load(teacher).graph.node if n.op_type == "Relu")
    student = examples.digits_model(hidden=64)
    mine = next(n.output[0] for n in student.graph.node if n.op_type == "Relu")
    x, _ = digits()
    x = x[:32]
    values = []
    for features in ({}, {mine: relu}):
        artifacts = onnxtrain.distill(
            student, teacher, loss=None, features=features, optimizer="sgd:lr=0"
        )
        values.append(Trainer(artifacts).step(x).loss)

    def hidden(model: onnx.ModelProto, name: str) -> np.ndarray:
        model = onnx.ModelProto.FromString(model.SerializeToString())
        model.graph.output.append(onnx.ValueInfoProto(name=name))
        session = onnxruntime.InferenceSession(model.SerializeToString())
        return session.run([name], {session.get_inputs()[0].name: x})[0]

    error = ((hidden(student, mine) - hidden(onnx.load(teacher), relu)) ** 2).mean()
    assert values[1] - values[0] == pytest.approx(error, rel=1e-4)


def two_inputs() -> onnx.ModelProto:
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="m"))
    a, b = (op.input(n, ir.DataType.FLOAT, ["batch", 64]) for n in ("a", "b"))
    y = op.Add(a, b)
    y.name = "logits"
    op.graph.outputs.append(y)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def test_refusals(teacher: Path, tmp_path: Path) -> None:
    student = examples.digits_model()
    with pytest.raises(PrepareError, match="the teacher reads a, b, the model has image"):
        onnxtrain.distill(student, two_inputs(), optimizer="sgd")
    with pytest.raises(PrepareError, match="the teacher has no value 'logit'\nhint: it has logits"):
        onnxtrain.distill(student, teacher, teacher_output="logit", optimizer="sgd")
    with pytest.raises(PrepareError, match="weight must be from 0 to 1"):
        onnxtrain.distill(student, teacher, weight=2, optimizer="sgd")
    with pytest.raises(PrepareError, match="features need teacher="):
        losses.Distillation(features={"a": "b"})
    names = [
        next(n.output[0] for n in m.graph.node if n.op_type == "Relu")
        for m in (student, onnx.load(teacher))
    ]
    with pytest.raises(ShapeError, match="have different shapes"):
        onnxtrain.distill(student, teacher, features=dict([names]), optimizer="sgd")
    with pytest.raises(PrepareError, match="reads image, which the data does not have"):
        onnxtrain.teacher_logits(teacher, {"x": np.zeros((2, 64))}, tmp_path / "t.npy")
