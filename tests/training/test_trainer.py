"""One step of a trainer: layouts, accumulation, averages, groups, values, errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import save_file

from onnxtrain import optim
from onnxtrain.artifacts import Clip
from onnxtrain.artifacts.build import build
from onnxtrain.errors import (
    CheckpointError,
    OnnxTrainError,
    ParameterError,
    PrepareError,
    ShapeError,
)
from onnxtrain.training import Trainer
from onnxtrain.training.engine import LAYOUTS
from tests.artifacts.models import classifier, data, example, with_norm

from .made import LOSS, made, same
from .nets import batches, exported

OPTIMIZERS = {
    **{name: kind() for name, kind in optim.OPTIMIZERS.items()},
    "sgd": optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": optim.AdamW(lr=1e-2),
    "hf": optim.AdamW(lr=1e-2, form="hf"),
    "lamb": optim.LAMB(lr=1e-2),
    "rmsprop": optim.RMSprop(momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layouts_give_the_same_bits(name: str) -> None:
    artifacts = made(optimizer=OPTIMIZERS[name], clip=Clip(norm=0.5, value=0.1), ema=0.9)
    fused, separate = (Trainer(artifacts, layout=kind) for kind in ("fused", "separate"))
    for seed in range(6):
        batch = data(5 + seed, seed=seed)
        assert fused.step(*batch).loss == separate.step(*batch).loss
    same(fused.state_dict(), separate.state_dict())
    assert fused.global_step == separate.global_step == 6


def test_layouts_agree_on_batch_norm_and_dropout() -> None:
    model = exported("cnn", training=True)
    artifacts = build(model, loss="cross_entropy", optimizer="adam")
    fused, *others = (Trainer(artifacts, layout=layout, seed=5) for layout in LAYOUTS)
    assert [trainer.layout for trainer in others] == ["separate", "vector"]
    for batch in batches("cnn", 5):
        loss = fused.step(*batch).loss
        assert [trainer.step(*batch).loss for trainer in others] == [loss, loss]
    for trainer in others:
        same(fused.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updating_in_place_changes_nothing(name: str) -> None:
    artifacts = made(optimizer=OPTIMIZERS[name], clip=1.0, ema=0.9)
    models = artifacts.manifest.models
    copying = dataclasses.replace(
        artifacts,
        manifest=dataclasses.replace(
            artifacts.manifest, models=tuple(dataclasses.replace(m, in_place=()) for m in models)
        ),
    )
    parameters = {p.name for p in artifacts.manifest.parameters}
    assert any(parameters <= set(m.in_place) for m in models if m.role == "optimizer")
    states = []
    for variant in (artifacts, copying):
        trainer = Trainer(variant, layout="separate", threads=2)
        for seed in range(5):
            trainer.step(*data(8, seed=seed))
        states.append(trainer.state_dict())
    same(*states)


def test_size_decides_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = made(clip=1.0)  # the norm of all gradients is not elementwise
    assert Trainer(clipped).layout == "fused"
    assert Trainer(made()).layout == "vector"
    assert Trainer(made(accumulate=2)).layout == "separate"
    monkeypatch.setattr("onnxtrain.thresholds.SECOND_COPY_BYTES", 100)
    assert Trainer(clipped).layout == "separate"


def test_accumulated_batches_are_one_large_batch() -> None:
    x, labels = data(32)
    small, large = Trainer(made(accumulate=4)), Trainer(made())
    for _ in range(3):
        results = [small.step(x[i : i + 8], labels[i : i + 8]) for i in range(0, 32, 8)]
        assert [r.updated for r in results] == [False, False, False, True]
        assert np.mean([r.loss for r in results]) == pytest.approx(large.step(x, labels).loss)
    assert small.global_step == large.global_step == 3
    for name, value in large.parameters.items():
        np.testing.assert_allclose(small.parameters[name], value, rtol=1e-5, atol=1e-6)


def test_an_incomplete_accumulation_is_flushed() -> None:
    x, labels = data(16)
    small, large = Trainer(made(accumulate=4)), Trainer(made())
    small.step(x[:8], labels[:8])
    small.step(x[8:], labels[8:])
    with pytest.raises(OnnxTrainError, match="accumulated but not applied"):
        small.save("nowhere")
    assert small.flush()
    assert not small.flush()
    large.step(x, labels)
    for name, value in large.parameters.items():
        np.testing.assert_allclose(small.parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["fused", "vector"])
def test_only_the_separate_layout_accumulates(layout: str) -> None:
    with pytest.raises(OnnxTrainError, match=r"accumulate over 2 batches\nhint: .*'separate'"):
        Trainer(made(accumulate=2), layout=layout)


def test_a_layout_needs_its_models() -> None:
    with pytest.raises(OnnxTrainError, match="'vector' needs a gradients model"):
        Trainer(made(clip=1.0), layout="vector")


def test_moving_average(tmp_path: Path) -> None:
    trainer = Trainer(made(ema=0.75))
    average = dict(trainer.parameters)
    for seed in range(4):
        trainer.step(*data(8, seed=seed))
        average = {n: 0.75 * a + 0.25 * trainer.parameters[n] for n, a in average.items()}
    trainer.export(tmp_path / "average.onnx", ema=True)
    model = onnx.load(tmp_path / "average.onnx")
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)  # noqa: TID251 - reads the file as others do
        np.testing.assert_allclose(value, average[tensor.name], rtol=1e-5, atol=1e-6)
    with pytest.raises(OnnxTrainError, match="no moving average of weights"):
        Trainer(made()).export(tmp_path / "x.onnx", ema=True)


def test_clipping_as_torch_does() -> None:
    batch = data(8)
    plain, clipped, cut = (Trainer(made(clip=c)) for c in (None, 0.05, Clip(value=0.01)))
    start, gradients = dict(plain.parameters), plain.gradients(*batch)
    tensors = [torch.nn.Parameter(torch.from_numpy(start[n])) for n in start]
    for t, n in zip(tensors, start, strict=True):
        t.grad = torch.from_numpy(gradients[n].copy())
    torch.nn.utils.clip_grad_norm_(tensors, 0.05)
    clipped.step(*batch)
    cut.step(*batch)
    for t, n in zip(tensors, start, strict=True):
        assert t.grad is not None
        moved = (start[n] - clipped.parameters[n]) / 0.1
        np.testing.assert_allclose(moved, t.grad.numpy(), rtol=1e-3, atol=1e-6)
        moved = (start[n] - cut.parameters[n]) / 0.1
        np.testing.assert_allclose(moved, np.clip(gradients[n], -0.01, 0.01), rtol=1e-3, atol=1e-6)


def test_groups() -> None:
    groups = [
        optim.ParamGroup("*.bias", lr_factor=0.0),
        optim.ParamGroup("fc2.*", weight_decay=0.5),
    ]
    trainer = Trainer(made(optimizer=optim.SGD(lr=0.1, groups=groups)))
    start, gradients = dict(trainer.parameters), trainer.gradients(*data(8))
    trainer.step(*data(8))
    for name in ("fc1.bias", "fc2.bias"):
        np.testing.assert_array_equal(trainer.parameters[name], start[name])
    expected = start["fc1.weight"] - 0.1 * gradients["fc1.weight"]
    np.testing.assert_allclose(trainer.parameters["fc1.weight"], expected, atol=1e-6)
    expected = start["fc2.weight"] * 0.95 - 0.1 * gradients["fc2.weight"]
    np.testing.assert_allclose(trainer.parameters["fc2.weight"], expected, atol=1e-6)


@pytest.mark.parametrize("options", [{"freeze": "fc1.*"}, {"train": ["fc2.weight", "fc2.bias"]}])
def test_frozen_parameters_stay(options: dict, tmp_path: Path) -> None:
    trainer = Trainer(made(**options))
    assert list(trainer.parameters) == ["fc2.weight", "fc2.bias"]
    trainer.step(*data(8))
    trainer.export(tmp_path / "m.onnx")
    old = {t.name: t.raw_data for t in classifier().graph.initializer}
    new = {t.name: t.raw_data for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert {n for n in old if old[n] != new[n]} == {"fc2.weight", "fc2.bias"}


def test_metrics_and_extra_outputs() -> None:
    names = ["accuracy", "top_2", "grad_norm"]
    trainer = Trainer(made(metrics=names, outputs=["scores", "hid*"]))
    for n in (7, 3, 9):  # outputs must not be left over from the last call
        x, labels = data(n, seed=n)
        predicted = trainer.predict(x=x)
        norm = np.sqrt(sum((g**2).sum() for g in trainer.gradients(x, labels).values()))
        evaluated = trainer.evaluate_batch(x, labels)
        result = trainer.step(x=x, labels=labels)
        assert list(result.metrics) == names
        assert list(evaluated.metrics) == names[:2]
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert float(result) == result.loss == pytest.approx(evaluated.loss)
        accuracy = (predicted["scores"].argmax(1) == labels).mean()
        assert result.metrics["accuracy"] == pytest.approx(accuracy)
        assert evaluated.metrics["accuracy"] == pytest.approx(accuracy)
        for key in ("scores", "hidden"):
            np.testing.assert_allclose(result.outputs[key], predicted[key], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(evaluated.outputs[key], predicted[key], atol=1e-6)


def test_gradients_change_nothing() -> None:
    artifacts = build(with_norm(), loss="mse", optimizer=optim.Adam())
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4, 5)).astype(np.float32)
    y = rng.standard_normal((6, 3)).astype(np.float32)
    for layout in ("fused", "separate"):
        trainer = Trainer(artifacts, layout=layout)
        trainer.step(x, y)
        before = trainer.state_dict()
        gradients = trainer.gradients(x=x, target=y)
        same(before, trainer.state_dict())
        assert gradients.keys() == {"norm.weight", "norm.bias", "head.weight"}
        norm, head = torch.nn.BatchNorm1d(4), torch.nn.Linear(20, 3, bias=False)
        with torch.no_grad():
            norm.weight.copy_(torch.from_numpy(before["norm.weight"]))
            norm.bias.copy_(torch.from_numpy(before["norm.bias"]))
            head.weight.copy_(torch.from_numpy(before["head.weight"].T.copy()))
        out = head(torch.sin(norm(torch.from_numpy(x))).flatten(1))
        torch.nn.functional.mse_loss(out, torch.from_numpy(y)).backward()
        assert norm.weight.grad is not None
        assert head.weight.grad is not None
        np.testing.assert_allclose(gradients["norm.weight"], norm.weight.grad, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            gradients["head.weight"], head.weight.grad.T, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("training", [False, True])
def test_statistics_that_two_nodes_share(training: bool) -> None:
    """Each use updates them in turn, with torch's unbiased variance."""
    artifacts = build(with_norm(training, shared=True), loss="mse", optimizer=optim.SGD(lr=0.0))
    trainer, norm = Trainer(artifacts), torch.nn.BatchNorm1d(4)
    rng = np.random.default_rng(0)
    for n in (6, 3, 1):
        x = rng.standard_normal((n, 4, 5)).astype(np.float32)
        norm(torch.sin(norm(torch.from_numpy(x))))
        trainer.step(x, np.zeros((n, 3), np.float32))
        np.testing.assert_allclose(
            trainer.buffers["norm.running_mean"], norm.running_mean, rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            trainer.buffers["norm.running_var"], norm.running_var, rtol=1e-4, atol=1e-6
        )


def test_statistics_that_share_an_initializer_with_the_scale() -> None:
    """Some exporters store equal tensors once."""
    model = with_norm()
    (node,) = (n for n in model.graph.node if n.op_type == "BatchNormalization")
    node.input[3], node.input[4] = "norm.bias", "norm.weight"
    kept = [t for t in model.graph.initializer if "running" not in t.name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    artifacts = build(model, loss="mse", optimizer="adam")
    plain = build(with_norm(), loss="mse", optimizer="adam")
    x, y = np.ones((4, 4, 5), np.float32), np.zeros((4, 3), np.float32)
    x[0] = 0
    trainers = [Trainer(a) for a in (artifacts, plain)]
    for _ in range(3):
        a, b = (t.step(x, y).loss for t in trainers)
        assert a == b
    same(*(t.state_dict() for t in trainers))
    same(*(t.predict(x=x) for t in trainers))


def test_mode_as_is_keeps_batch_norm_in_inference() -> None:
    trainer = Trainer(build(with_norm(), loss="mse", optimizer=optim.SGD(lr=0.1), mode="as-is"))
    x = np.random.default_rng(0).standard_normal((4, 4, 5)).astype(np.float32)
    trainer.step(x, np.zeros((4, 3), np.float32))
    np.testing.assert_array_equal(trainer.buffers["norm.running_mean"], np.zeros(4))
    assert not np.array_equal(trainer.parameters["norm.weight"], np.ones(4))


def test_exported_model_is_the_predictor(tmp_path: Path) -> None:
    model = exported("cnn", training=True)
    trainer = Trainer(build(model, loss="cross_entropy", optimizer="adamw"))
    for batch in batches("cnn", 4):
        trainer.step(*batch)
    trainer.export(tmp_path / "cnn.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "cnn.onnx")
    x, _ = batches("cnn", 1, size=3, seed=5)[0]
    # Not bitwise: with constant weights the runtime folds the normalisation into the convolution.
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], trainer.predict(x)["y"], rtol=1e-5, atol=1e-6
    )
    proto = onnx.load(tmp_path / "cnn.onnx")
    assert not {n.op_type for n in proto.graph.node} & {"Dropout"}
    assert not proto.metadata_props


def test_the_seed_determines_the_run() -> None:
    model = exported("cnn", training=True)
    artifacts = build(model, loss="cross_entropy", optimizer="adam")

    def run(seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = Trainer(artifacts, seed=seed)
        return [trainer.step(*b).loss for b in batches("cnn", 6)], trainer.state_dict()

    first, second, other = run(3), run(3), run(4)
    assert first[0] == second[0]
    same(first[1], second[1])
    assert first[0] != other[0]


def test_fixed_sizes() -> None:
    artifacts = made(dims={"batch": 4})
    spec = artifacts.manifest.model("step")
    assert spec is not None
    assert spec.inputs[0].shape == (4, 6)
    trainer, free = Trainer(artifacts), Trainer(made())
    assert trainer.step(*data(4)).loss == pytest.approx(free.step(*data(4)).loss, rel=1e-6)
    with pytest.raises(ShapeError, match=r"'x' is float32\[4, 6\], got shape \[5, 6\]"):
        trainer.step(*data(5))
    with pytest.raises(PrepareError, match="unknown dimension in `dims`: bacth"):
        made(dims={"bacth": 4})


def test_float64_models() -> None:
    model = classifier(dtype=np.float64)
    trainer = Trainer(build(model, loss=LOSS, optimizer="adam"))
    x, labels = data(16)
    first = trainer.step(x, labels).loss
    for _ in range(20):
        last = trainer.step(x, labels).loss
    assert last < first
    assert trainer.parameters["fc1.weight"].dtype == np.float64


def test_reading_and_setting_parameters() -> None:
    for layout in ("fused", "separate"):
        trainer = Trainer(made(), layout=layout)
        trainer.step(*data(8))
        copy = trainer.parameters["fc2.bias"]
        copy[:] = 7
        assert not (trainer.parameters["fc2.bias"] == 7).any()
        trainer.parameters["fc2.bias"] = copy
        assert (trainer.parameters["fc2.bias"] == 7).all()
        scores = trainer.predict(data(2)[0])["scores"]
        assert (scores > 3).all()
        with pytest.raises(ShapeError, match=r"'fc2.bias' has shape \[3\], got \[4\]"):
            trainer.parameters["fc2.bias"] = np.zeros(4)
        with pytest.raises(KeyError):
            trainer.parameters["nothing"] = copy
        with pytest.raises(TypeError):
            del trainer.parameters["fc2.bias"]


def test_load_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {n: a.shape for n, a in Trainer(made()).parameters.items()}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    save_file(weights, tmp_path / "w.safetensors")
    tensors = {n: torch.from_numpy(a) for n, a in weights.items()}
    for source in (weights, tmp_path / "w.safetensors", tensors):
        trainer = Trainer(made())
        assert sorted(trainer.load_weights(source)) == sorted(weights)
        same(dict(trainer.parameters), {n: weights[n] for n in trainer.parameters})
    trainer = Trainer(made())
    some = {"fc1.bias": weights["fc1.bias"], "other": np.zeros(1)}
    with pytest.raises(CheckpointError, match=r"missing fc1\.weight.* unknown other"):
        trainer.load_weights(some)
    assert trainer.load_weights(some, strict=False) == ["fc1.bias"]
    with pytest.raises(CheckpointError, match=r"'fc1.bias' has shape \[9\], expected \[8\]"):
        trainer.load_weights({"fc1.bias": np.zeros(9)}, strict=False)


def test_a_checkpoint_continues_to_the_same_bits(tmp_path: Path) -> None:
    artifacts = made(optimizer=optim.AdamW(lr=0.01))
    first = Trainer(artifacts, seed=3)
    for seed in range(3):
        first.step(*data(8, seed=seed))
    first.lr, first.properties["note"] = 0.005, "half way"
    first.save(tmp_path / "c")
    second, third = Trainer(artifacts, layout="separate"), Trainer(artifacts)
    assert second.load(tmp_path / "c")["step"] == 3
    third.load_state_dict(first.state_dict())
    third.lr, third.global_step = first.lr, first.global_step
    assert (second.lr, second.seed, second.properties) == (0.005, 3, {"note": "half way"})
    for seed in range(3, 6):
        losses_now = {t.step(*data(8, seed=seed)).loss for t in (first, second, third)}
        assert len(losses_now) == 1
    same(first.state_dict(), second.state_dict())
    same(first.state_dict(), third.state_dict())


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    other = Trainer(build(with_norm(), loss="mse", optimizer="sgd"))
    other.save(tmp_path / "other")
    trainer = Trainer(made(optimizer="adam"))
    before = trainer.state_dict()
    with pytest.raises(CheckpointError, match=r"does not fit these artifacts:\n  'fc1"):
        trainer.load(tmp_path / "other")
    save_file(dict(trainer.parameters), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no training progress"):
        trainer.load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load(tmp_path / "nowhere")
    same(before, trainer.state_dict())


def test_a_parameter_that_does_not_train_is_named() -> None:
    trainer = Trainer(example())
    hint = r"nearest: fc2\.weight, .*\nhint: frozen weights are constants .* train= and freeze="
    with pytest.raises(ParameterError, match=r"^no trainable parameter 'fc1\.weight'; " + hint):
        trainer.parameters["fc1.weight"]
    with pytest.raises(ParameterError, match=r"parameter 'fc1\.biass'"):
        trainer.parameters["fc1.biass"] = np.zeros(3)
    with pytest.raises(ParameterError, match="no buffer 'mean'; nearest: none"):
        trainer.buffers["mean"]
    assert "fc1.weight" not in trainer.parameters
    assert trainer.parameters.get("fc1.weight") is None
    with pytest.raises(KeyError):
        trainer.parameters["nope"]
