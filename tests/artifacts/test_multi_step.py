"""Several steps per call, and the models of both web targets in one directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import PrepareError
from onnxtrain.manifest import Manifest
from onnxtrain.optim import transforms as T
from onnxtrain.training.trainer import Trainer
from tests.artifacts.models import classifier, data, finished, graph, weight, with_norm

K, BATCH = 3, 5
SCORES = [losses.LossTerm("cross_entropy", output="scores")]


def dropping() -> onnx.ModelProto:
    """x [batch, 6] -> y [batch, 3], with a dropout mask that changes from step to step."""
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    w = weight(op, "w", np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32))
    ratio = weight(op, "ratio", np.array(0.5, np.float32))
    return finished(op, y=op.MatMul(op.Dropout(x, ratio), w))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowing(optim.Optimizer):
    """SGD whose state is one scalar per parameter, of whatever shape."""

    elementwise = True

    def chain(self, weight_decay: float) -> tuple[T.Transform, ...]:
        """Halve each step."""

        def update(u: T.Update) -> None:
            u.new_state["size"] = u.op.Mul(u.state["size"], 0.5)
            u.gradient = u.op.Mul(u.gradient, u.new_state["size"])

        slots = lambda dims, dtype: [optim.Slot("size", (), dtype, 1.0)]  # noqa: E731
        return (T.Transform(update, slots),)


def built(model: onnx.ModelProto, **options: Any) -> Artifacts:
    options = {"loss": "cross_entropy", "optimizer": "adamw", "metrics": ["accuracy"], **options}
    return build(model, **options)


CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "adamw": (classifier, {"loss": SCORES, "outputs": ["scores"]}, (6,)),
    "everything": (
        classifier,
        {
            "loss": SCORES,
            "optimizer": optim.SGD(momentum=0.9),
            "clip": 0.5,
            "ema": 0.9,
            "freeze": "fc1.weight",
        },
        (6,),
    ),
    "groups": (
        classifier,
        {
            "loss": SCORES,
            "metrics": ["accuracy", "grad_norm"],
            "optimizer": optim.AdamW(groups=[optim.ParamGroup("*.bias", weight_decay=0.0)]),
        },
        (6,),
    ),
    **{
        f"{name}, decay": (
            classifier,
            {"loss": SCORES, "optimizer": f"{name}:weight_decay=0.1"},
            (6,),
        )
        for name in optim.OPTIMIZERS
    },
    "scalar state": (classifier, {"loss": SCORES, "optimizer": Slowing()}, (6,)),
    "batch norm": (with_norm, {}, (4, 5)),
    "batch norm as it is": (with_norm, {"mode": "as-is"}, (4, 5)),
    "dropout": (dropping, {}, (6,)),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_single_steps(case: str) -> None:
    model, options, dims = CASES[case]
    artifacts = built(model(), steps_per_call=K, **options)
    spec = artifacts.manifest.model("step", steps=K)
    assert spec is not None
    assert spec.steps_per_call == K
    trainer = Trainer(artifacts, seed=3, layout="fused")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((K, BATCH, *dims)).astype(np.float32)
    y = rng.integers(0, 3, (K, BATCH))
    rates = np.array([1e-2, 5e-3, 2e-2], np.float32)
    singles = []
    for i in range(K):
        trainer.lr = float(rates[i])
        singles.append(trainer.step(x[i], y[i]))

    session = ort.InferenceSession(artifacts.source("step", steps=K))
    start = {**artifacts.values, **artifacts.state}
    controls = {
        "lr": rates,
        "step": np.arange(1, K + 1),
        "rng": np.array([[3, i + 1] for i in range(K)], np.float32),
        "input": x,
        "target": y,
    }
    feeds = {t.name: controls[t.role] if t.role in controls else start[t.name] for t in spec.inputs}
    for t in spec.inputs:
        assert [d for d in t.shape if isinstance(d, int)] == [
            d for d, s in zip(feeds[t.name].shape, t.shape, strict=True) if isinstance(s, int)
        ]
    names = [t.name for t in spec.outputs]
    outputs: dict[str, Any] = dict(zip(names, session.run(names, feeds), strict=True))
    for i, single in enumerate(singles):
        assert outputs["loss"][i] == single.loss
        assert outputs["accuracy"][i] == single.metrics["accuracy"]
    after = {**trainer.state_dict()}
    for t in spec.outputs:
        if t.feeds is not None and t.role != "state":
            np.testing.assert_array_equal(outputs[t.name], after[t.feeds], err_msg=t.name)


def test_loss_that_is_also_an_output() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 2])
    w = weight(op, "w", np.ones((2, 1), np.float32))
    error = op.ReduceMean(op.MatMul(x, w), keepdims=0)
    model = finished(op, error=error)
    artifacts = build(model, loss="error", optimizer="sgd", outputs=["error"], steps_per_call=2)
    spec = artifacts.manifest.model("step", steps=2)
    assert spec is not None
    session = ort.InferenceSession(artifacts.source("step", steps=2))
    x_ = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    feeds = {
        "x": x_,
        "learning_rate": np.zeros(2, np.float32),
        "step": np.array([1, 2]),
        "w": np.ones((2, 1), np.float32),
    }
    outputs = session.run([t.name for t in spec.outputs], feeds)
    by_name: dict[str, Any] = {t.name: v for t, v in zip(spec.outputs, outputs, strict=True)}
    for t in spec.outputs:
        if t.role in ("loss", "output"):
            np.testing.assert_array_equal(np.ravel(by_name[t.name]), x_.sum(2).mean(1))
    np.testing.assert_array_equal(by_name["w.out"], np.ones((2, 1)))


def test_small_parameters_are_updated_together() -> None:
    def nodes(**options: Any) -> list[str]:
        built_ = built(classifier(), loss=SCORES, steps_per_call=2, **options)
        scan = next(n for n in built_.models["step.x2"].graph.node if n.op_type == "Scan")
        body = next(a.g for a in scan.attribute if a.name == "body")
        return [n.op_type for n in body.node]

    assert nodes().count("Sqrt") == 2  # of the scalar and of the moments
    assert nodes(optimizer="rmsprop").count("Sqrt") == 1
    biases = [optim.ParamGroup("*.bias", lr_factor=0.5)]
    assert nodes(optimizer=optim.AdamW(groups=biases)).count("Sqrt") == 3
    assert nodes(optimizer="lamb").count("Sqrt") > 4  # norms of whole tensors


def test_denormal_state_becomes_zero() -> None:
    artifacts = built(classifier(), loss=SCORES, steps_per_call=2)
    spec = artifacts.manifest.model("step", steps=2)
    assert spec is not None
    rows = np.zeros((2, BATCH, 6), np.float32)
    given = {"input": rows, "target": np.zeros((2, BATCH), np.int64), "step": np.array([1, 2])}
    given["lr"] = np.zeros(2, np.float32)
    start = {**artifacts.values, **artifacts.state}
    start["fc1.weight.exp_avg"] = np.full_like(start["fc1.weight.exp_avg"], 1e-36)
    feeds = {t.name: given[t.role] if t.role in given else start[t.name] for t in spec.inputs}
    session = ort.InferenceSession(artifacts.source("step", steps=2))
    names = ["fc1.weight.exp_avg.out", "fc2.bias.exp_avg.out", "fc1.weight.out"]
    denormal, live, weight_ = (np.asarray(v) for v in session.run(names, feeds))
    assert not denormal.any()
    assert live.any()
    np.testing.assert_array_equal(weight_, start["fc1.weight"])


def test_defaults() -> None:
    def counts(**options: Any) -> list[int]:
        made = built(with_norm(), **options).manifest.models
        return [m.steps_per_call for m in made if m.role == "step"]

    assert counts() == [1]
    assert counts(target="wasm") == [1, 8]
    assert counts(target="wasm", steps_per_call=1) == [1]
    assert counts(target="wasm", accumulate=2) == [1]
    assert counts(target="webgpu") == [1]
    assert counts(steps_per_call=4) == [1, 4]
    for wrong in ({"steps_per_call": 0}, {"steps_per_call": 2, "accumulate": 2}):
        with pytest.raises(PrepareError, match="steps_per_call"):
            counts(**wrong)


def test_web_has_models_for_both_targets(tmp_path: Path) -> None:
    artifacts = built(with_norm(), target="web")
    manifest = artifacts.save(tmp_path, prefix="net_")
    files = sorted(p.name for p in tmp_path.iterdir())
    assert "net_step_model.x8.onnx" in files
    assert "net_step_model.webgpu.onnx" in files
    for role in ("train", "eval", "optimizer", "step"):
        for target in ("wasm", "webgpu"):
            assert manifest.model(role, target) is not None
    labels = {
        m.target: t.dtype
        for m in manifest.models
        if m.role == "step"
        for t in m.inputs
        if t.role == "target"
    }
    assert labels == {"wasm": "int64", "webgpu": "int32"}
    again = Artifacts.load(tmp_path, "net_")
    assert again.manifest.to_dict() == manifest.to_dict()
    assert again.save(tmp_path / "copy").models[0].file == "training_model.onnx"
    copied = Manifest.from_json((tmp_path / "copy" / "manifest.json").read_text())
    assert [m.sha256 != "" for m in copied.models] == [True] * len(copied.models)
    runs = []
    x, y = data(BATCH, features=20)
    for source in (again, built(with_norm())):
        trainer = Trainer(source)
        runs.append([trainer.step(x.reshape(BATCH, 4, 5), y).loss for _ in range(3)])
    assert runs[0] == pytest.approx(runs[1], abs=1e-6)


def test_web_shares_equal_models(tmp_path: Path) -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 2])
    w = weight(op, "w", np.ones((2, 1), np.float32))
    model = finished(op, y=op.MatMul(x, w))
    manifest = build(model, loss="mse", optimizer="sgd", target="web").save(tmp_path)
    both = {m.target: m.file for m in manifest.models if m.role == "eval"}
    assert both == {"wasm": "eval_model.onnx", "webgpu": "eval_model.onnx"}
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == 1
