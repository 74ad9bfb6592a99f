"""Metrics of a whole data set, beside scikit-learn and torchmetrics, and the best epoch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sklearn import metrics as sk
from sklearn.preprocessing import label_binarize

from onnxtrain import examples, losses
from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError, PrepareError, ShapeError
from onnxtrain.losses.metrics import DATA_SET_METRICS
from onnxtrain.training import EarlyStopping, Trainer
from onnxtrain.training.metrics import BUILT_IN, OBJECTS, Comparison
from tests.artifacts.models import data, finished, graph, weight
from tests.training.made import made, same


def net(outputs: int, activation: str = "", loss: str = "cross_entropy") -> Trainer:
    """Return a trainer of one layer: x [batch, 6] -> y [batch, outputs]."""
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6])
    values = np.random.default_rng(1).standard_normal((6, outputs)).astype(np.float32)
    y = op.MatMul(x, weight(op, "w", values))
    if activation:
        y = getattr(op, activation)(y)
    return Trainer(build(finished(op, y=y), loss=loss, optimizer="sgd:lr=0.5"))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


NAMES = ["accuracy", "precision", "recall", "f1", "auc", "map", "top_2", "confusion_matrix"]


@pytest.mark.parametrize("activation", ["", "Softmax"])
def test_built_in_metrics_of_classes_equal_scikit_learn(activation: str) -> None:
    x, labels = data(90)
    trainer = net(3, activation)
    y = trainer.predict(x)["y"]
    p, classes = y if activation else softmax(y), y.argmax(1)
    got = trainer.evaluate(x, labels, metrics=NAMES, batch_size=16).metrics
    assert got.pop("confusion_matrix") == sk.confusion_matrix(labels, classes).tolist()
    assert got == pytest.approx(
        {
            "accuracy": sk.accuracy_score(labels, classes),
            "precision": sk.precision_score(labels, classes, average="macro"),
            "recall": sk.recall_score(labels, classes, average="macro"),
            "f1": sk.f1_score(labels, classes, average="macro"),
            "auc": sk.roc_auc_score(labels, p, multi_class="ovr"),
            "map": sk.average_precision_score(label_binarize(labels, classes=range(3)), p),
            "top_2": sk.top_k_accuracy_score(labels, y, k=2),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("outputs", "activation", "loss"),
    [
        (2, "", "cross_entropy"),
        (1, "", "bce_with_logits"),
        (1, "Sigmoid", "bce_with_logits"),
        (1, "Sigmoid", "bce"),
        (2, "LogSoftmax", "nll"),
    ],
)
def test_two_classes_are_those_of_class_1(outputs: int, activation: str, loss: str) -> None:
    x, labels = data(80, classes=2)
    trainer = net(outputs, activation, loss)
    y = trainer.predict(x)["y"].astype(np.float64)
    score = y[:, 0] if outputs == 1 else y[:, 1] - y[:, 0]
    classes = score > (0.5 if activation == "Sigmoid" else 0)
    names = ["precision", "recall", "f1", "auc", "map"]
    assert trainer.evaluate(x, labels, metrics=names).metrics == pytest.approx(
        {
            "precision": sk.precision_score(labels, classes),
            "recall": sk.recall_score(labels, classes),
            "f1": sk.f1_score(labels, classes),
            "auc": sk.roc_auc_score(labels, score),
            "map": sk.average_precision_score(labels, score),
        },
        rel=1e-6,
    )


def test_several_labels_per_row() -> None:
    x, _ = data(60)
    labels = (np.random.default_rng(2).random((60, 4)) < 0.4).astype(np.float32)
    trainer = net(4, "", "bce_with_logits")
    y = trainer.predict(x)["y"]
    got = trainer.evaluate(x, labels, metrics=["f1", "auc", "map"]).metrics
    assert got == pytest.approx(
        {
            "f1": sk.f1_score(labels, y > 0, average="macro"),
            "auc": sk.roc_auc_score(labels, y),
            "map": sk.average_precision_score(labels, y),
        },
        rel=1e-6,
    )


def test_metrics_of_values() -> None:
    x, _ = data(50)
    targets = x[:, :2] + 0.1
    trainer = net(2, "", "mse")
    y = trainer.predict(x)["y"]
    got = trainer.evaluate(x, targets, metrics=["mae", "r2"]).metrics
    expected = {"mae": sk.mean_absolute_error(targets, y), "r2": sk.r2_score(targets, y)}
    assert got == pytest.approx(expected, rel=1e-5)
    own = {"mse": sk.mean_squared_error}
    expected = {"mse": sk.mean_squared_error(targets, y)}
    assert trainer.evaluate(x, targets, metrics=own).metrics == pytest.approx(expected)
    with pytest.raises(PrepareError, match=r"metric 'f1': the loss compares values.*\nhint: .*mae"):
        trainer.evaluate(x, targets, metrics="f1")


def test_ties_and_missing_classes() -> None:
    p = np.array([[0.5, 0.3, 0.2], [0.5, 0.1, 0.4], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]])
    labels = np.array([0, 1, 0, 1])
    c = Comparison(labels, p, "softmax", applied=True)
    assert BUILT_IN["auc"](c) == pytest.approx(
        np.mean([sk.roc_auc_score(labels == i, p[:, i]) for i in range(2)])
    )
    assert BUILT_IN["map"](c) == pytest.approx(
        np.mean([sk.average_precision_score(labels == i, p[:, i]) for i in range(2)])
    )
    assert BUILT_IN["f1"](c) == pytest.approx(sk.f1_score(labels, p.argmax(1), average="macro"))
    same_class = Comparison(np.array([0, 0]), p[:2], "softmax", applied=True)
    assert np.isnan(BUILT_IN["auc"](same_class))
    ignored = Comparison(np.array([0, 1, -100, 1]), p, "softmax", applied=True)
    assert BUILT_IN["accuracy"](ignored) == pytest.approx(1 / 3)


def test_labels_of_every_position() -> None:
    """Class axis 1, as in torch, and -1."""
    scores = np.random.default_rng(3).standard_normal((5, 4, 7))
    labels = np.random.default_rng(4).integers(0, 4, (5, 7))
    expected = sk.f1_score(labels.ravel(), scores.argmax(1).ravel(), average="macro")
    for given in (scores, scores.transpose(0, 2, 1)):
        assert BUILT_IN["f1"](Comparison(labels, given, "softmax")) == pytest.approx(expected)


def test_functions_of_scikit_learn_get_labels_or_probabilities() -> None:
    x, labels = data(90)
    trainer = net(3)
    y = trainer.predict(x)["y"]
    macro = functools.partial(sk.f1_score, average="macro")
    given = {
        "f1": macro,
        "auc": functools.partial(sk.roc_auc_score, multi_class="ovr"),
        "log_loss": sk.log_loss,
        "matrix": sk.confusion_matrix,
    }
    got = trainer.evaluate(x, labels, metrics=given).metrics
    assert got["f1"] == pytest.approx(macro(labels, y.argmax(1)))
    assert got["auc"] == pytest.approx(sk.roc_auc_score(labels, softmax(y), multi_class="ovr"))
    assert got["log_loss"] == pytest.approx(trainer.evaluate(x, labels).loss, rel=1e-5)
    assert got["matrix"] == sk.confusion_matrix(labels, y.argmax(1)).tolist()


def test_any_function_gets_targets_and_the_output() -> None:
    x, labels = data(30)
    seen: list[Any] = []

    def share(targets: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
        seen.append((targets, predictions))
        return {"of_0": float((targets == 0).mean())}

    trainer = Trainer(made())  # two outputs: the loss reads scores
    got = trainer.evaluate(x, labels, metrics=share, batch_size=8)
    assert got.metrics == {"share_of_0": float((labels == 0).mean())}
    np.testing.assert_array_equal(seen[0][0], labels)
    np.testing.assert_allclose(seen[0][1], trainer.predict(x)["scores"], rtol=1e-5, atol=1e-6)


def test_several_targets_are_dicts() -> None:
    terms = [
        losses.LossTerm("cross_entropy", output="scores", target="labels"),
        losses.LossTerm("mse", output="hidden", target="h"),
    ]
    trainer = Trainer(made(loss=terms))
    x, labels = data(20)
    batch = {"x": x, "labels": labels, "h": np.zeros((20, 8), np.float32)}
    accuracy = {"accuracy": lambda t, p: (p["scores"].argmax(1) == t["labels"]).mean()}
    expected = (trainer.predict(x)["scores"].argmax(1) == labels).mean()
    assert trainer.evaluate(batch, metrics=accuracy).metrics == {"accuracy": expected}
    with pytest.raises(PrepareError, match=r"metric 'f1': found several targets .*\nhint: "):
        trainer.evaluate(batch, metrics="f1")


def test_objects_and_functions_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    x, labels = data(90)
    trainer = net(3)
    classes = trainer.predict(x)["y"].argmax(1)
    functional = functools.partial(
        torchmetrics.functional.accuracy, task="multiclass", num_classes=3
    )
    given = {
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
        "accuracy": functional,
    }
    for _ in range(2):  # objects are reset
        got = trainer.evaluate(x, labels, metrics=given, batch_size=16).metrics
        assert got == pytest.approx(
            {
                "f1": sk.f1_score(labels, classes, average="macro"),
                "accuracy": (labels == classes).mean(),
            }
        )
    assert isinstance(given["f1"].compute(), torch.Tensor)


def test_metrics_of_a_run_are_monitored_and_recorded(tmp_path: Path) -> None:
    x, labels = data(120)
    trainer = net(3)
    macro = functools.partial(sk.f1_score, average="macro")
    history = trainer.fit(
        x,
        labels,
        validation=data(60, seed=1),
        metrics={"f1": macro, "matrix": "confusion_matrix"},
        monitor="val_f1",
        epochs=4,
        directory=tmp_path,
        progress=False,
    )
    values = [r["val_f1"] for r in history.epochs]
    assert history.best is not None
    assert history.best["val_f1"] == max(values) > values[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["val_f1"] for r in rows if r["kind"] == "epoch"] == values
    assert np.sum(history.best["val_matrix"]) == 60
    assert "val_f1" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_metrics_are_resumed(tmp_path: Path) -> None:
    given = {"metrics": ["f1"], "validation": data(40, seed=1), "progress": False}
    whole = net(3).fit(data(80), epochs=4, **given).epochs
    net(3).fit(data(80), epochs=2, directory=tmp_path, **given)
    resumed = net(3).fit(data(80), epochs=4, directory=tmp_path, resume=True, **given)
    assert resumed.epochs == whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": ["f1"]}, r"computed on validation data\nhint: fit\(\.\.\., validation=data\)"),
        ({"metrics": ["f2"]}, r"unknown metric: 'f2' \(expected one of .*f1, "),
        ({"metrics": ["perplexity"]}, r"metric of the graph\nhint: build\(.*\['perplexity'\]"),
        ({"metrics": [7]}, r"metric 'int' is a int\nhint: pass a name, a function"),
        ({"metrics": {"loss": sk.f1_score}}, r"already reports 'loss'\nhint: .*'my_loss'"),
        (
            {"monitor": "val_acc"},
            r"unknown monitor.*\nhint: .*metrics=\['accuracy'\], monitor='val",
        ),
        (
            {"metrics": {"cost": sk.f1_score}, "monitor": "val_cost"},
            "larger or a smaller 'val_cost'",
        ),
        (
            {"metrics": ["f1"], "monitor": "val_f1", "schedule": "reduce_on_plateau"},
            r"waits for a smaller 'val_f1'.*\nhint: schedule='reduce_on_plateau:mode=max'",
        ),
    ],
)
def test_wrong_metrics_and_monitors_are_found_before_the_first_epoch(
    given: dict[str, Any], message: str
) -> None:
    trainer = net(3)
    if given.get("metrics") != ["f1"] or "monitor" in given:
        given = {"validation": data(20), **given}
    with pytest.raises(OnnxTrainError, match=message):
        trainer.fit(data(40), progress=False, **given)
    assert trainer.global_step == 0


def test_monitor_says_which_is_better() -> None:
    cost = {"cost": lambda targets, predictions: float(len(targets))}
    options = {"validation": data(20), "metrics": cost, "progress": False}
    history = net(3).fit(data(40), epochs=2, monitor="max:val_cost", **options)
    assert history.best is not None
    assert history.best["epoch"] == 1


def test_a_metric_that_fails_says_what_it_got() -> None:
    trainer = net(3)
    x, labels = data(40)
    failing = {"f1": lambda targets, predictions: sk.f1_score(targets, predictions)}
    message = (
        r"metric 'f1' failed: ValueError: .*\nhint: it gets targets int64\[40\] and predictions "
        r"float32\[40, 3\]; for classes: lambda targets, predictions: f\(targets, predictions.arg"
    )
    with pytest.raises(OnnxTrainError, match=message):
        trainer.evaluate(x, labels, metrics=failing)
    followed = {"f1": lambda t, p: sk.f1_score(t, p.argmax(1), average="macro")}
    assert trainer.evaluate(x, labels, metrics=followed).metrics["f1"] > 0
    with pytest.raises(OnnxTrainError, match="metric 'f': it returned str\nhint: return a number"):
        trainer.evaluate(x, labels, metrics={"f": lambda t, p: "good"})


def test_rows_of_different_lengths_need_an_object() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", "length", 6])
    w = weight(op, "w", np.ones((6, 6), np.float32))
    trainer = Trainer(build(finished(op, y=op.MatMul(x, w)), loss="mse", optimizer="sgd"))
    batches = [(np.ones((2, n, 6), np.float32),) * 2 for n in (3, 4)]
    with pytest.raises(ShapeError, match=r"batches of 'target' .*: \[3, 6\], \[4, 6\]\nhint: pad"):
        trainer.evaluate(batches, metrics="mae")

    class Count:
        def __init__(self) -> None:
            self.rows = 0

        def update(self, predictions: np.ndarray, targets: np.ndarray) -> None:
            self.rows += len(targets)

        def compute(self) -> int:
            return self.rows

    assert trainer.evaluate(batches, metrics={"rows": Count()}).metrics == {"rows": 4.0}


def test_metrics_of_data_sets_are_not_metrics_of_graphs() -> None:
    assert {*DATA_SET_METRICS} == {*BUILT_IN, *OBJECTS} - {"accuracy", "mae"}
    with pytest.raises(PrepareError, match=r"'f1' is not a mean .*\nhint: fit\(\.\.\., metrics="):
        made(metrics=["f1"])
    trainer = Trainer(made(metrics=["accuracy"]))
    once = trainer.evaluate(data(20), metrics=["accuracy", "f1"]).metrics
    assert list(once) == ["accuracy", "f1"]


# -- the best epoch ------------------------------------------------------------------------


def batches(epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return data whose labels are wrong after four epochs."""
    x, labels = data(64)
    return [(x, labels if epoch < 4 else 2 - labels)]


def worse_later(directory: Path | None, **options: Any) -> tuple[Trainer, Any]:
    """Train until later epochs are worse; return the trainer and its history."""
    trainer = net(3)
    history = trainer.fit(
        batches,
        validation=data(64, seed=1),
        metrics=["f1"],
        epochs=8,
        directory=directory,
        progress=False,
        **options,
    )
    assert history.best is not None
    assert history.best["epoch"] < len(history.epochs)
    return trainer, history


@pytest.mark.parametrize("saved", [True, False])
def test_early_stopping_restores_the_best_epoch(saved: bool, tmp_path: Path) -> None:
    stopping = EarlyStopping(3, monitor="val_f1", restore_best=True)
    trainer, history = worse_later(tmp_path if saved else None, callbacks=[stopping])
    got = trainer.evaluate(data(64, seed=1), metrics=["f1"])
    assert got.metrics["f1"] == history.best["val_f1"] == max(r["val_f1"] for r in history.epochs)
    assert trainer.global_step == history.best["step"] < history.epochs[-1]["step"]


def test_a_function_that_calls_scikit_learn_gets_labels() -> None:
    digits = examples.digits_data(200)
    trainer = Trainer(build(examples.digits_model(), loss="cross_entropy", optimizer="sgd"))
    f1 = {"f1": lambda t, p: sk.f1_score(t, p, average="macro")}
    logits = trainer.predict(digits)["logits"]
    expected = sk.f1_score(digits["labels"], logits.argmax(1), average="macro")
    assert trainer.evaluate(digits, metrics=f1).metrics["f1"] == pytest.approx(expected)
    broken = {"broken": lambda t, p: t.missing}
    with pytest.raises(OnnxTrainError, match="metric 'broken' failed: AttributeError"):
        trainer.evaluate(digits, metrics=broken)


def test_early_stopping_follows_the_monitor_of_fit() -> None:
    digits = examples.digits_data(200)
    artifacts = build(examples.digits_model(), loss="cross_entropy", optimizer="adamw:lr=0.01")
    stopping = EarlyStopping(5, restore_best=True)
    trainer = Trainer(artifacts)
    trainer.fit(
        digits,
        epochs=3,
        validation=digits,
        metrics={"quality": lambda t, p: float((t == p).mean())},
        monitor="max:val_quality",
        callbacks=[stopping],
        progress=False,
    )
    assert (stopping.monitor, stopping.mode) == ("val_quality", "max")
    assert stopping.value is not None


def test_restore_best_after_a_resume(tmp_path: Path) -> None:
    def stopping() -> EarlyStopping:
        return EarlyStopping(100, monitor="val_f1", restore_best=True)

    whole, history = worse_later(tmp_path / "a", callbacks=[stopping()])
    options = {"validation": data(64, seed=1), "metrics": ["f1"], "progress": False}
    options["directory"] = tmp_path / "b"
    net(3).fit(batches, epochs=6, **options, callbacks=[stopping()])
    trainer = net(3)
    trainer.fit(batches, epochs=8, resume=True, **options, callbacks=[stopping()])
    same(whole.state_dict(), trainer.state_dict())
    assert trainer.global_step == history.best["step"]


def test_restore_best_needs_one_monitor() -> None:
    stopping = EarlyStopping(3, monitor="val_f1", restore_best=True)
    with pytest.raises(OnnxTrainError, match=r"is by 'val_loss', EarlyStopping .*'val_f1'\nhint"):
        worse_later(None, callbacks=[stopping], monitor="val_loss")


def test_export_of_the_best_epoch(tmp_path: Path) -> None:
    trainer, _ = worse_later(tmp_path / "run", monitor="val_f1")
    before = trainer.state_dict()
    trainer.export(tmp_path / "best.onnx", best=True)
    same(before, trainer.state_dict())
    trainer.export(tmp_path / "last.onnx")
    trainer.load(tmp_path / "run" / "checkpoints" / "best.safetensors")
    trainer.export(tmp_path / "loaded.onnx")
    best, loaded = ((tmp_path / f"{n}.onnx").read_bytes() for n in ("best", "loaded"))
    assert best == loaded != (tmp_path / "last.onnx").read_bytes()
    assert onnx.load_from_string(best).graph.output[0].name == "y"
    with pytest.raises(OnnxTrainError, match=r"saved its best epoch\nhint: fit\(.*directory="):
        net(3).export(tmp_path / "none.onnx", best=True)
