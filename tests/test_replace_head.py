"""Replaced heads and reinitialized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from safetensors.numpy import save_file

import onnxtrain
from onnxtrain.errors import CheckpointError, PrepareError
from tests.artifacts.models import classifier, data, finished, graph, weight


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {n: x.const_value.numpy() for n, x in ir.from_proto(model).graph.initializers.items()}  # type: ignore[union-attr]


def matmul_head(transposed: bool) -> onnx.ModelProto:
    """What exporters make of a linear layer on three axes."""
    rng, op = np.random.default_rng(0), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 5, 4])
    shape = (3, 4) if transposed else (4, 3)
    w = weight(op, "head.weight", rng.standard_normal(shape).astype(np.float32))
    b = weight(op, "head.bias", rng.standard_normal(3).astype(np.float32))
    h = op.MatMul(x, op.Transpose(w, perm=[1, 0]) if transposed else w)
    return finished(op, scores=op.Softmax(op.Add(b, h), axis=-1))


def conv_head() -> onnx.ModelProto:
    rng, op = np.random.default_rng(0), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4, 6, 6])
    w = weight(op, "head.weight", rng.standard_normal((3, 4, 1, 1)).astype(np.float32))
    b = weight(op, "head.bias", rng.standard_normal(3).astype(np.float32))
    h = op.GlobalAveragePool(op.Conv(x, w, b))
    return finished(op, scores=op.Flatten(h))


MODELS = {
    "gemm": (classifier(), (2, 6), (2, 7), "fc2"),
    "matmul": (matmul_head(False), (2, 5, 4), (2, 5, 7), "head"),
    "transposed": (matmul_head(True), (2, 5, 4), (2, 5, 7), "head"),
    "conv": (conv_head(), (2, 4, 6, 6), (2, 7), "head"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_added_classes_keep_the_results_of_the_others(kind: str) -> None:
    model, given, expected, _ = MODELS[kind]
    new = onnxtrain.replace_head(model, "scores", add_classes=4)
    onnx.checker.check_model(new, full_check=True)
    x = np.random.default_rng(1).standard_normal(given).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0]
        for m in (model, new)
    )
    assert after.shape == expected
    if kind in ("matmul", "transposed"):  # behind a softmax, the ratios stay
        after = after[..., :3] / after[..., :3].sum(-1, keepdims=True)
    np.testing.assert_allclose(after[..., :3], before, rtol=1e-5)


def test_classes_or_added_classes() -> None:
    with pytest.raises(PrepareError, match="either classes= or add_classes="):
        onnxtrain.replace_head(classifier(), "scores")
    with pytest.raises(PrepareError, match="either classes= or add_classes="):
        onnxtrain.replace_head(classifier(), "scores", 3, add_classes=1)
    with pytest.raises(PrepareError, match="add_classes must be at least 1: 0"):
        onnxtrain.replace_head(classifier(), "scores", add_classes=0)


@pytest.mark.parametrize("kind", MODELS)
def test_replaced_heads(kind: str) -> None:
    model, given, expected, head = MODELS[kind]
    new = onnxtrain.replace_head(model, "scores", 7)
    onnx.checker.check_model(new, full_check=True)
    (actual, *_) = onnxruntime.InferenceSession(new.SerializeToString()).run(
        None, {"x": np.ones(given, np.float32)}
    )
    assert actual.shape == expected
    old, fresh = weights(model), weights(new)
    assert old.keys() == fresh.keys()
    for name in old:
        if name.startswith(head):
            assert 7 in fresh[name].shape
            assert np.abs(fresh[name]).max() <= 0.5  # 1 / sqrt(fan_in), which is at least 4
            assert fresh[name].std() > 0.05
        else:
            np.testing.assert_array_equal(old[name], fresh[name])
    again = onnxtrain.replace_head(model, "scores", 7)
    other = onnxtrain.replace_head(model, "scores", 7, seed=1)
    assert new.SerializeToString() == again.SerializeToString() != other.SerializeToString()
    sizes = [d.dim_value for d in new.graph.output[0].type.tensor_type.shape.dim]
    assert sizes[-1] == 7


def detector(sizes: str = "constant", after: str = "Sigmoid", group: int = 1) -> onnx.ModelProto:
    """Two levels of anchor-free YOLO: 8 channels of distances and 3 of classes."""
    rng, op = np.random.default_rng(0), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 3, 32, 32])
    levels = []
    for i, stride in enumerate((8, 16)):
        h = op.AveragePool(x, kernel_shape=[stride, stride], strides=[stride, stride])
        parts = []
        for name, channels in (("box", 8), ("class", 3)):
            shape = (channels, 3 // group if name == "class" else 3, 1, 1)
            w = weight(op, f"{name}{i}.weight", rng.standard_normal(shape).astype(np.float32))
            b = weight(op, f"{name}{i}.bias", np.full(channels, -1.0 - i, np.float32))
            parts.append(op.Conv(h, w, b, group=group if name == "class" else 1))
        y = op.Concat(*parts, axis=1)
        if sizes == "constant":
            shape = op.const([0, 11, -1])
        else:
            batch = op.Unsqueeze(op.Gather(op.Shape(y), op.const(0)), [0])
            shape = op.Concat(batch, op.const([11]), op.const([-1]), axis=0)
        levels.append(op.Reshape(y, shape))
    y = op.Concat(*levels, axis=2)
    distances, logits = op.Split(y, op.const([8, 3]), axis=1, _outputs=2)
    distances.name, logits.name = "distances", "logits"
    return finished(op, y=op.Concat(distances, getattr(op, after)(logits), axis=1))


@pytest.mark.parametrize("sizes", ["constant", "computed"])
def test_classes_of_a_detector(sizes: str) -> None:
    model = detector(sizes)
    x = np.random.default_rng(1).standard_normal((2, 3, 32, 32)).astype(np.float32)

    def run(model: onnx.ModelProto) -> np.ndarray:
        onnx.checker.check_model(model, full_check=True)
        return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]

    before = run(model)
    new = onnxtrain.replace_head(model, "logits", classes=2)
    assert run(new).shape == (2, 10, 20)
    assert new.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 10
    np.testing.assert_array_equal(run(new)[:, :8], before[:, :8])
    assert weights(new)["class1.weight"].shape == (2, 3, 1, 1)
    assert weights(new)["class1.bias"].tolist() == [-2.0, -2.0]
    more = onnxtrain.replace_head(model, "logits", add_classes=1)
    np.testing.assert_allclose(run(more)[:, :11], before, rtol=1e-6)
    assert run(more).shape == (2, 12, 20)

    loss = onnxtrain.losses.YOLO(strides=(8, 16))
    term = onnxtrain.losses.LossTerm(loss, output=["distances", "logits"])
    trainer = onnxtrain.Trainer(onnxtrain.build(new, loss=[term], optimizer="adamw:lr=0.02"))
    boxes = np.array([[[12, 12, 16, 16]], [[20, 20, 12, 20]]], np.float32)
    rows = {"x": x, "labels": np.array([[0], [1]]), "boxes": boxes}
    losses = [trainer.step(**rows).loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_detectors_that_are_not_followed() -> None:
    for model, name, message in (
        (detector(group=3), "logits", r"the class layers of 'logits' .* Conv .* is on the way"),
        (detector(after="Softplus"), "logits", r"Softplus .* reads 'logits', whose number"),
        (detector(), "y", r"the class layers of 'y' were not found: Split"),
    ):
        with pytest.raises(PrepareError, match=rf"{message}.*\nhint: replace_head follows"):
            onnxtrain.replace_head(model, name, classes=2)


def test_the_new_head_learns() -> None:
    """The old task has three classes, the new one five; only the head is trained."""
    model = onnxtrain.replace_head(classifier(hidden=32), "scores", 5)
    artifacts = onnxtrain.build(
        model,
        loss=[onnxtrain.losses.LossTerm("cross_entropy", output="scores")],
        optimizer="adam:lr=0.02",
        train="fc2.*",
        metrics=["accuracy"],
    )
    trainer = onnxtrain.Trainer(artifacts)
    trainer.fit(data(400, classes=5), epochs=15, progress=False)
    assert trainer.evaluate(data(200, classes=5, seed=1)).metrics["accuracy"] > 0.75


def test_further_weights() -> None:
    model = classifier()
    new = weights(onnxtrain.replace_head(model, "scores", 3, reinitialize="fc1.*"))
    old = weights(model)
    assert not np.array_equal(old["fc1.weight"], new["fc1.weight"])
    assert np.abs(new["fc1.weight"]).max() <= 1 / np.sqrt(6)
    np.testing.assert_array_equal(new["fc1.bias"], np.zeros(8))
    with pytest.raises(PrepareError, match=r"unknown weight in `reinitialize`: 'fc9\.\*'"):
        onnxtrain.replace_head(model, "scores", 3, reinitialize=["fc9.*"])


def test_heads_that_cannot_be_replaced() -> None:
    with pytest.raises(PrepareError, match=r"unknown output: 'logits'\nhint: the model has scores"):
        onnxtrain.replace_head(classifier(), "logits", 4)
    with pytest.raises(PrepareError, match="classes must be at least 1"):
        onnxtrain.replace_head(classifier(), "scores", 0)
    with pytest.raises(PrepareError, match="'hidden' is computed by Tanh"):
        onnxtrain.replace_head(classifier(), "hidden", 4)
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4])
    w = weight(op, "w", np.eye(4, dtype=np.float32))
    tied = finished(op, scores=op.MatMul(op.Tanh(op.MatMul(x, w)), w))
    with pytest.raises(PrepareError, match="'w' is shared with another layer"):
        onnxtrain.replace_head(tied, "scores", 4)
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4])
    h = op.MatMul(x, weight(op, "w", np.eye(4, dtype=np.float32)))
    used = finished(op, scores=op.Identity(h), more=op.Tanh(h))
    with pytest.raises(PrepareError, match="also feeds other nodes"):
        onnxtrain.replace_head(used, "scores", 4)


def test_weights_from_elsewhere(tmp_path: Path) -> None:
    model = classifier()
    new = {n: np.full_like(a, 2.0) for n, a in weights(model).items()}
    save_file(new, tmp_path / "w.safetensors")
    for source in (new, tmp_path / "w.safetensors"):
        loaded = weights(onnxtrain.load_weights(model, source))
        assert all(np.array_equal(loaded[n], new[n]) for n in new)
    with pytest.raises(CheckpointError, match=r"missing fc1\.weight.*, unknown other"):
        onnxtrain.load_weights(model, {"other": np.ones(1)})
    some = weights(onnxtrain.load_weights(model, {"fc1.bias": np.ones(8)}, strict=False))
    np.testing.assert_array_equal(some["fc1.bias"], np.ones(8, np.float32))
    np.testing.assert_array_equal(some["fc2.bias"], weights(model)["fc2.bias"])
    with pytest.raises(CheckpointError, match=r"'fc1.bias' has shape \[9\], expected \[8\]"):
        onnxtrain.load_weights(model, {"fc1.bias": np.ones(9)}, strict=False)
