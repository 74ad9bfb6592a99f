"""What new users try first: each trial gives a result, or a message whose hint works when followed.

The trials of a walk through the library as a Python and a command-line user, one test each, in the
order in which they come up. They use what a user has: a model of two layers, arrays, files.
"""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.neural_network import MLPClassifier
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.cli.main import app
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model
from onnxtrain.losses import MSE, Accuracy, CrossEntropy, LossTerm
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer, read_data
from tests.artifacts.models import classifier, data, finished, graph, weight

X, Y = data(64)
README = Path(__file__).resolve().parents[1] / "README.md"


def build(model: Any = None, **options: Any) -> onnxtrain.Artifacts:
    """Build a model, by default x [batch, 6] -> scores [batch, 3]."""
    settings = {"loss": LossTerm("cross_entropy", output="scores"), "optimizer": "adam"}
    if model is not None:
        settings["loss"] = "cross_entropy"
    return onnxtrain.build(classifier() if model is None else model, **{**settings, **options})


@pytest.fixture(scope="module")
def artifacts() -> onnxtrain.Artifacts:
    return build(metrics=["accuracy"])


@pytest.fixture
def trainer(artifacts: onnxtrain.Artifacts) -> Trainer:
    return Trainer(artifacts)


def fit(trainer: Trainer, *given: Any, **options: Any) -> onnxtrain.training.History:
    return trainer.fit(*given, **{"progress": False, **options})


def layer(outputs: int, activation: str = "", dims: int | str = "batch", name: str = "y") -> Any:
    """Return x [batch, 6] -> y [batch, outputs]."""
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, [dims, 6])
    values = np.random.default_rng(5).standard_normal((6, outputs)).astype(np.float32)
    y = op.MatMul(x, weight(op, "w", values))
    return finished(op, **{name: getattr(op, activation)(y) if activation else y})


def hint_of(message: str, call: Any) -> str:
    """Return the hint of the error that a call raises."""
    with pytest.raises((OnnxTrainError, KeyboardInterrupt), match=message) as caught:
        call()
    text = str(caught.value)
    assert "\nhint: " in text, text
    return text.partition("\nhint: ")[2]


# -- getting started -----------------------------------------------------------------------


def test_the_readme_prints_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "readme"})
    (accuracy,) = re.findall(r"metrics=\{'accuracy': ([0-9.]+)\}", capsys.readouterr().out)
    assert float(accuracy) > 0.95
    assert Path("trained.onnx").exists()


def command(*words: object) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with the files of ``onnxtrain example`` and artifacts."""
    monkeypatch.chdir(tmp_path)
    command("example")
    command("build", "model.onnx", "-o", "art", "--loss", "cross_entropy", "--metric", "accuracy")
    return tmp_path


def test_the_command_line_from_example_to_export(place: Path) -> None:
    command("train", "art", "--data", "train.npz", "--lr", 0.01, "--epochs", 3, "--quiet")
    printed = command("eval", "art", "--data", "test.npz")
    assert float(printed.splitlines()[1].removeprefix("accuracy ")) > 0.9
    command("export", "art", "-o", "trained.onnx")
    assert onnx.load("trained.onnx").graph.output[0].name == "logits"


# -- models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "loss", "labels"),
    [("Softmax", "cross_entropy", Y), ("Sigmoid", "bce_with_logits", np.eye(3)[Y])],
)
def test_a_model_that_ends_in_its_activation(
    activation: str, loss: str, labels: np.ndarray
) -> None:
    plain = fit(Trainer(build(layer(3), loss=loss)), X, labels, epochs=3)
    ended = build(layer(3, activation), loss=loss)
    assert any(activation in line for line in ended.manifest.options["repairs"])
    assert fit(Trainer(ended), X, labels, epochs=3).losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_model_exported_with_a_batch_of_one() -> None:
    expected = fit(Trainer(build(layer(3))), X, Y, batch_size=32).losses
    for options in ({}, {"dims": {"x[0]": "batch"}}):
        artifacts = build(layer(3, dims=1), **options)
        assert fit(Trainer(artifacts), X, Y, batch_size=32).losses == pytest.approx(expected)


def test_gradient_accumulation_over_a_batch_of_one() -> None:
    whole = fit(Trainer(build(layer(3))), X, Y, batch_size=32, shuffle=False)
    parts = Trainer(build(layer(3), accumulate=32, dims={"batch": 1}))
    fit(parts, X, Y, shuffle=False)
    assert parts.global_step == len(whole.steps)
    trained = Trainer(build(layer(3)))
    fit(trained, X, Y, batch_size=32, shuffle=False)
    np.testing.assert_allclose(parts.parameters["w"], trained.parameters["w"], rtol=1e-4)


def two_inputs() -> Any:
    op = graph()
    a, b = (op.input(n, ir.DataType.FLOAT, ["batch", 3]) for n in "ab")
    w = weight(op, "w", np.ones((3, 2), np.float32))
    return finished(op, price=op.MatMul(a, w), size=op.MatMul(b, w))


def test_several_inputs_and_outputs() -> None:
    hint = hint_of("MSE: the model has several outputs", lambda: build(two_inputs(), loss="mse"))
    assert "LossTerm(MSE(), output='price')" in hint
    built = build(two_inputs(), loss=LossTerm(MSE(), output="price"))
    batch = {"a": X[:, :3], "b": X[:, 3:], "target": X[:, :2]}
    assert fit(Trainer(built), batch, epochs=20, lr=0.1).losses[-1] < 0.5


def test_a_metric_with_two_losses() -> None:
    terms = [
        LossTerm("cross_entropy", output="scores", target="labels"),
        LossTerm("mse", output="hidden", target="h"),
    ]
    hint = hint_of("metric 'accuracy'", lambda: build(loss=terms, metrics=["accuracy"]))
    assert "Accuracy(output=..., target=...)" in hint
    metric = Accuracy(output="scores", target="labels")
    batch = {"x": X, "labels": Y, "h": np.zeros((64, 8), np.float32)}
    record = fit(Trainer(build(loss=terms, metrics=[metric])), batch).epochs[0]
    assert 0 <= record["accuracy"] <= 1


def test_class_weights_of_another_count() -> None:
    def weighted(*weights: float) -> onnxtrain.Artifacts:
        return build(layer(3), loss=CrossEntropy(weight=list(weights)))

    hint = hint_of(r"\(2,\) weights for 3 classes", lambda: weighted(1, 2))
    assert "one weight per class" in hint
    assert fit(Trainer(weighted(1, 2, 3)), X, Y).losses


def test_a_random_forest() -> None:
    skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")
    forest = skl2onnx.to_onnx(RandomForestClassifier(3, max_depth=2).fit(X, Y), X[:1])
    hint = hint_of("no parameter is left to train", lambda: build(forest))
    assert "scikit-learn's MLPClassifier" in hint
    net = MLPClassifier((8,), max_iter=5, random_state=0)
    with pytest.warns(match="Maximum iterations"):
        net.fit(X, Y)
    options = {"zipmap": False}
    proto = skl2onnx.to_onnx(net, X[:1], options=options, target_opset=18)
    losses = fit(Trainer(build(proto)), X, Y, epochs=9, lr=0.02).losses
    assert losses[-1] < losses[0]


def test_a_mistyped_output_of_scikit_learn() -> None:
    skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")
    proto = skl2onnx.to_onnx(LogisticRegression().fit(X, Y), X[:1], target_opset=18)

    def chosen(output: str) -> onnxtrain.Artifacts:
        return build(proto, loss=LossTerm("cross_entropy", output=output))

    hint = hint_of("unknown output: 'probabilty'", lambda: chosen("probabilty"))
    names = hint.removeprefix("the model has ").split(", ")
    assert sorted(names) == sorted(y.name for y in proto.graph.output)
    assert fit(Trainer(chosen(names[0])), X, Y).losses


def test_a_quantized_file(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(layer(3), tmp_path / "model.onnx")
    path = tmp_path / "quantized.onnx"
    quantization.quantize_dynamic(tmp_path / "model.onnx", path)
    hint = hint_of("no parameter is left to train", lambda: build(path))
    assert "train the float model" in hint
    assert fit(Trainer(build(tmp_path / "model.onnx")), X, Y).losses


def test_a_model_of_strings_is_cut() -> None:
    hint = hint_of("string", lambda: build(onnx.parser.parse_model(WORDS)))
    assert "extract_model" in hint


WORDS = """<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 4]>
g (string[N] word) => (float[N,3] y)
<float[1,3] w = {1.0, 2.0, 3.0}> {
    i = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [0, 1]> (word)
    f = Cast <to = 1> (i)
    shape = Constant <value_ints = [-1, 1]> ()
    c = Reshape(f, shape)
    y = MatMul(c, w)
}"""


def test_batch_norm_with_a_last_batch_of_one() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4])
    values = {"scale": 1, "bias": 0, "mean": 0, "var": 1}
    norm = [weight(op, n, np.full(4, v, np.float32)) for n, v in values.items()]
    artifacts = build(finished(op, y=op.BatchNormalization(x, *norm)))
    rows = X[:33, :4], Y[:33]
    hint = hint_of("batch of 1 give", lambda: fit(Trainer(artifacts), rows, batch_size=32))
    assert "drop_last=True" in hint
    assert fit(Trainer(artifacts), rows, batch_size=32, drop_last=True).losses


# -- objects of other libraries, and files, in the wrong place -----------------------------


def test_a_loss_of_python_operators() -> None:
    def half_square(op: Any, y: Any) -> Any:
        target = op.input("target", ir.DataType.FLOAT, ["batch", 3])
        return op.ReduceMean((y - target) ** 2 * 0.5, keepdims=0)

    artifacts = build(layer(3), loss=half_square)
    expected = fit(Trainer(build(layer(3), loss="mse")), X, np.eye(3)[Y]).losses
    assert fit(Trainer(artifacts), X, np.eye(3)[Y]).losses[0] == pytest.approx(expected[0] / 2)


def test_a_loss_of_torch() -> None:
    loss = torch.nn.CrossEntropyLoss()
    expected = fit(Trainer(build(layer(3))), X, Y).losses
    artifacts = build(layer(3), loss=loss)
    assert fit(Trainer(artifacts), X, Y).losses == pytest.approx(expected)


def test_an_optimizer_of_torch() -> None:
    hint = hint_of("not an optimizer", lambda: build(optimizer=torch.optim.Adam))
    followed = eval(hint.partition(";")[0].removeprefix("optimizer="))
    assert build(optimizer=followed).manifest.optimizer["name"] == "Adam"


def test_a_module_of_torch() -> None:
    module = torch.nn.Linear(6, 3)
    hint = hint_of("a module of torch", lambda: build(module))
    assert "onnxtrain.torch.from_torch(module, example_inputs)" in hint
    losses = fit(Trainer(build(from_torch(module, (torch.zeros(2, 6),)))), X, Y).losses
    assert losses[0] > 0


def test_a_trainer_of_an_onnx_file(tmp_path: Path) -> None:
    onnx.save(layer(3), tmp_path / "model.onnx")
    hint = hint_of("is an ONNX model, not a dir", lambda: Trainer(str(tmp_path / "model.onnx")))
    assert "onnxtrain.build(path, loss=..., optimizer=...).save(directory)" in hint
    for other in (layer(3), b"", torch.nn.Linear(2, 2)):
        hint = hint_of("is not a directory of artifacts", lambda other=other: Trainer(other))
        assert "onnxtrain.build(model, loss=..., optimizer=...)" in hint
    build(tmp_path / "model.onnx").save(tmp_path / "art")
    assert Trainer(tmp_path / "art").inputs == ["x", "labels"]


# -- values --------------------------------------------------------------------------------


def test_regression_targets_without_their_last_axis() -> None:
    built, y = build(layer(1), loss="mse"), X.sum(1)
    assert fit(Trainer(built), X, y).losses == fit(Trainer(built), X, y[:, None]).losses
    assert fit(Trainer(build(layer(3))), X, Y[:, None]).losses


def broken() -> np.ndarray:
    x = X.copy()
    x[[9, 40], 2] = np.nan
    return x


def test_nan_in_the_data_names_the_rows(trainer: Trainer) -> None:
    x = broken()
    hint = hint_of(r"in rows 9, 40\b", lambda: fit(trainer, x, Y, batch_size=64))
    assert "remove these rows" in hint
    assert fit(trainer, np.delete(x, [9, 40], 0), np.delete(Y, [9, 40])).losses


def test_nan_in_targets_names_the_row() -> None:
    y = X.sum(1)
    y[17] = np.nan
    built = build(layer(1), loss="mse")
    hint = hint_of(r"in row 17\b", lambda: fit(Trainer(built), X, y))
    assert "replace the values" in hint
    assert fit(Trainer(built), X, np.nan_to_num(y)).losses


def test_nan_in_the_data_with_debug_nan(trainer: Trainer) -> None:
    hint_of(r"in rows 9, 40\b", lambda: fit(trainer, broken(), Y, batch_size=64, debug_nan=True))


def test_nan_in_a_step_changes_nothing(trainer: Trainer) -> None:
    before = trainer.state_dict()
    assert not trainer.step(broken(), Y).updated
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_labels_that_are_not_class_indices(trainer: Trainer) -> None:
    hint = hint_of("the model has 3 classes: 0 to 2", lambda: fit(trainer, X, Y + 1))
    assert hint == "labels count from 0; subtract 1"
    labels = Y.astype(float)
    labels[3] = np.nan
    hint = hint_of("got NaN in row 3", lambda: fit(trainer, X, labels))
    assert "drop these rows" in hint
    expected = fit(Trainer(trainer.artifacts), np.delete(X, 3, 0), np.delete(Y, 3)).losses
    assert fit(trainer, np.delete(X, 3, 0), np.delete(labels, 3)).losses == expected


def embedding() -> Any:
    op = graph()
    ids = op.input("ids", ir.DataType.INT64, ["batch", 4])
    table = weight(op, "table", np.random.default_rng(0).standard_normal((10, 3)).astype("f"))
    return finished(op, y=op.ReduceMean(op.Gather(table, ids), [1], keepdims=0))


def test_an_index_that_an_embedding_does_not_have() -> None:
    ids = np.arange(64 * 4).reshape(64, 4) % 10
    ids[5, 2] = 30
    trainer = Trainer(build(embedding()))
    message = r"'ids' has 30 in row 5\b.*; 'table' has 10 rows: 0 to 9"
    hint = hint_of(message, lambda: fit(trainer, ids, Y, batch_size=64))
    assert trainer.global_step == 0
    hint_of(message, lambda: trainer.evaluate(ids, Y))
    hint_of(message, lambda: trainer.predict(ids))
    followed = eval(re.findall(r"np\.minimum\(.*?\)", hint)[0], {"np": np, "ids": ids})
    assert fit(trainer, followed, Y).losses
    hint = hint_of("'ids' has 10 in row", lambda: fit(trainer, ids % 10 + 1, Y))
    assert hint == "indices count from 0; subtract 1"


def test_one_hot_labels(trainer: Trainer, artifacts: onnxtrain.Artifacts) -> None:
    assert fit(trainer, X, np.eye(3)[Y]).losses == fit(Trainer(artifacts), X, Y).losses


def test_images_of_another_rank(trainer: Trainer) -> None:
    x = X.reshape(64, 2, 3)
    hint = hint_of(r"'x' is float32\[batch, 6\], got shape", lambda: fit(trainer, x, Y))
    assert fit(trainer, eval(hint, {"x": x}), Y).losses


# -- kinds of data -------------------------------------------------------------------------


def test_x_and_y_as_in_scikit_learn(trainer: Trainer) -> None:
    assert len(fit(trainer, X, Y, epochs=2).epochs) == 2


NAMES = np.array(["cat", "ant", "bee"])[Y]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_with_a_column_per_feature(library: str, trainer: Trainer) -> None:
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    frame = module.DataFrame({f"f{i}": X[:, i] for i in range(6)} | {"label": NAMES})
    fit(trainer, frame, epochs=2)
    assert trainer.classes == {"labels": ["ant", "bee", "cat"]}
    np.testing.assert_array_equal(trainer.predict(frame)["scores"], trainer.predict(X)["scores"])


def test_string_labels(trainer: Trainer, artifacts: onnxtrain.Artifacts) -> None:
    order = np.array([2, 0, 1])[Y]
    assert fit(trainer, X, NAMES).losses == fit(Trainer(artifacts), X, order).losses


def test_a_csv_file_by_path(trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    rows = [",".join([*map(str, x), name]) for x, name in zip(X.tolist(), NAMES, strict=True)]
    path.write_text("\n".join(["a,b,c,d,e,f,label", *rows]))
    assert fit(trainer, str(path), validation=path).epochs[0]["val_loss"] > 0


def test_predict_takes_the_dict_that_evaluate_takes(trainer: Trainer) -> None:
    batch = {"x": X, "labels": Y}
    assert trainer.evaluate(batch).samples == 64
    np.testing.assert_array_equal(trainer.predict(batch)["scores"], trainer.predict(X)["scores"])


def test_a_generator_for_several_epochs(trainer: Trainer) -> None:
    def batches() -> Iterator[Any]:
        yield from ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16))

    hint = hint_of("only be read in one epoch", lambda: fit(trainer, batches(), epochs=3))
    assert "a function from the epoch to an iterable" in hint
    assert len(fit(trainer, lambda epoch: batches(), epochs=3).steps) == 12


def test_a_generator_of_single_rows(trainer: Trainer) -> None:
    rows = list(zip(X, Y, strict=True))
    hint = hint_of("single rows, and batches are expected", lambda: fit(trainer, rows))
    assert "fit(onnxtrain.Stream(rows), batch_size=32)" in hint
    assert len(fit(trainer, onnxtrain.Stream(rows), batch_size=32).steps) == 2


def test_a_tensor_data_set(trainer: Trainer, artifacts: onnxtrain.Artifacts) -> None:
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert fit(trainer, tensors).losses == fit(Trainer(artifacts), X, Y).losses


def test_batches_with_columns_that_nothing_reads(trainer: Trainer) -> None:
    batch = {"id": ["a"] * 64, "x": X, "label": Y}
    assert len(fit(trainer, [batch]).steps) == 1


def test_splits_of_a_data_set(trainer: Trainer) -> None:
    splits = {"train": {"x": X, "labels": Y}, "test": {"x": X, "labels": Y}}
    hint = hint_of("has splits: 'train', 'test'", lambda: fit(trainer, splits))
    assert "fit(data['train'], ...)" in hint
    assert fit(trainer, splits["train"]).losses


def test_a_folder_of_images_by_path(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pictures = digits_data(20)
    for i, (pixels, label) in enumerate(zip(*pictures.values(), strict=True)):
        folder = tmp_path / "pics" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray((pixels.reshape(8, 8) * 255).astype(np.uint8)).save(folder / f"{i}.png")
    trainer = Trainer(build(digits_model()))
    read = read_data(str(tmp_path / "pics"), trainer.batch_specs)
    assert read.arrays["image"].shape == (20, 64)
    assert fit(trainer, str(tmp_path / "pics")).losses


def test_augmentation(trainer: Trainer, artifacts: onnxtrain.Artifacts) -> None:
    def noise(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**batch, "x": batch["x"] + rng.normal(size=batch["x"].shape)}

    losses = [fit(Trainer(artifacts), X, Y, transform=noise).losses for _ in range(2)]
    assert losses[0] == losses[1] != fit(trainer, X, Y).losses


def test_data_larger_than_memory(trainer: Trainer) -> None:
    pieces = onnxtrain.Stream(lambda: ((X[i : i + 10], Y[i : i + 10]) for i in range(0, 64, 10)))
    assert len(fit(trainer, pieces, epochs=2, batch_size=16).steps) == 8


# -- runs ----------------------------------------------------------------------------------


def test_metrics_of_imbalanced_classes(trainer: Trainer) -> None:
    given = {"f1": f1_score, "recall": "recall", "auc": "auc"}
    hint = hint_of("'f1' failed: .*multiclass", lambda: trainer.evaluate(X, Y, metrics=given))
    assert "predictions.argmax(1)" in hint
    given["f1"] = lambda targets, p: f1_score(targets, p.argmax(1), average="macro")
    history = fit(trainer, X, Y, validation=(X, Y), metrics=given, monitor="val_f1", epochs=2)
    assert {"val_f1", "val_recall", "val_auc"} <= history.epochs[0].keys()


def test_early_stopping_and_the_best_epoch(trainer: Trainer, tmp_path: Path) -> None:
    stopping = onnxtrain.EarlyStopping(1, restore_best=True)
    options = {"validation": (X, Y), "callbacks": [stopping], "directory": tmp_path / "run"}
    history = fit(trainer, X, Y, epochs=4, **options)
    assert history.best is not None
    assert trainer.evaluate(X, Y).loss == pytest.approx(history.best["val_loss"], rel=1e-5)
    trainer.export(tmp_path / "best.onnx", best=True)
    trainer.export(tmp_path / "restored.onnx")
    best, restored = ((tmp_path / f"{n}.onnx").read_bytes() for n in ("best", "restored"))
    assert best == restored


class CtrlC(onnxtrain.Callback):
    """Press Ctrl-C in the first step."""

    def on_step(self, run: Any, result: Any) -> None:
        if result.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_script(artifacts: onnxtrain.Artifacts, tmp_path: Path) -> None:
    options = {"epochs": 2, "directory": str(tmp_path / "run")}
    interrupted = Trainer(artifacts)
    hint = hint_of(
        "interrupted after step 1; saved",
        lambda: fit(interrupted, X, Y, callbacks=[CtrlC()], **options),
    )
    assert f"directory={options['directory']!r}, resume=True" in hint
    expected = fit(Trainer(artifacts), X, Y, epochs=2).losses
    assert fit(Trainer(artifacts), X, Y, resume=True, **options).losses == expected
    trainer = Trainer(artifacts)
    hint = hint_of("nothing was saved", lambda: fit(trainer, X, Y, callbacks=[CtrlC()]))
    assert hint.startswith("trainer.save(path)")
    trainer.save(tmp_path / "weights")


def test_ctrl_c_on_the_command_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "art", "--data", "train.npz", "--quiet", "--batch-size", "128"]
    with monkeypatch.context() as patch:
        record = onnxtrain.training.Run._record_step

        def press(self: Any, *arguments: Any) -> None:
            record(self, *arguments)
            os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(onnxtrain.training.Run, "_record_step", press)
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert "hint: the same command with --resume continues" in result.stderr
    assert "trained to step 10" in command(*words, "--resume")


def test_resume_within_an_epoch_with_another_batch_size(
    artifacts: onnxtrain.Artifacts, tmp_path: Path
) -> None:
    options = {"epochs": 2, "directory": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fit(Trainer(artifacts), X, Y, batch_size=16, callbacks=[CtrlC()], **options)
    options["resume"] = True
    hint = hint_of(
        "cannot resume in epoch 1 after 1 of its batches: batch_size was 16, not 32",
        lambda: fit(Trainer(artifacts), X, Y, batch_size=32, **options),
    )
    assert "fit(..., resume=True, epochs=1) with the same options" in hint
    fit(Trainer(artifacts), X, Y, **{**options, "epochs": 1})
    assert len(fit(Trainer(artifacts), X, Y, batch_size=32, **options).steps) == 6


def test_resume_a_run_that_has_ended(artifacts: onnxtrain.Artifacts, tmp_path: Path) -> None:
    options = {"directory": tmp_path / "run"}
    fit(Trainer(artifacts), X, Y, epochs=2, **options)
    stopped = fit(Trainer(artifacts), X, Y, epochs=1, resume=True, **options).stopped
    assert stopped == "nothing to train: the run has 2 epochs; epochs=3 continues it"
    assert len(fit(Trainer(artifacts), X, Y, epochs=3, resume=True, **options).epochs) == 3


def test_a_mistyped_schedule(trainer: Trainer) -> None:
    hint = hint_of("unknown schedule: 'cosin'", lambda: fit(trainer, X, Y, schedule="cosin"))
    assert hint.startswith("did you mean cosine")
    assert fit(trainer, X, Y, schedule="cosine").losses


def test_a_schedule_as_a_function(trainer: Trainer) -> None:
    history = fit(trainer, X, Y, schedule=lambda step: 0.01 / step)
    assert [r["lr"] for r in history.steps] == [0.01, 0.005]


def test_cosine_with_data_of_unknown_length(trainer: Trainer) -> None:
    def batches() -> Iterator[Any]:
        yield X, Y

    hint = hint_of("cosine needs total", lambda: fit(trainer, batches, schedule="cosine"))
    assert hint == "write cosine:total=..."
    assert fit(trainer, batches, schedule="cosine:total=3").losses


def test_a_loop_and_a_metric_of_the_user(trainer: Trainer) -> None:
    for _ in range(3):
        result = trainer.step(X, Y)
    accuracy = (trainer.predict(X)["scores"].argmax(1) == Y).mean()
    assert float(result) > 0
    assert accuracy == pytest.approx(trainer.evaluate(X, Y).metrics["accuracy"])


def test_a_mistyped_monitor(trainer: Trainer) -> None:
    hint = hint_of("unknown monitor", lambda: fit(trainer, X, Y, monitor="val_acc"))
    assert hint == "fit(..., validation=data, monitor='val_accuracy')"
    assert fit(trainer, X, Y, validation=(X, Y), monitor="val_accuracy").best
    assert trainer.global_step == 2


def test_flags_of_other_programs(place: Path) -> None:
    words = ["train", "art", "--data", "train.npz", "--learning-rate", "0.1"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Possible options: --lr" in re.sub(r"\s+", " ", result.output)
    command("train", "art", "--data", "train.npz", "--lr", 0.1, "--quiet")


def test_tensorboard(trainer: Trainer, tmp_path: Path) -> None:
    fit(trainer, X, Y, directory=tmp_path / "run", tensorboard=True)
    assert list((tmp_path / "run" / "events").glob("events.out.tfevents.*"))
    assert "`events/`" in (README.parent / "docs" / "training.md").read_text(encoding="utf-8")


def test_two_trainers_of_one_artifact(artifacts: onnxtrain.Artifacts) -> None:
    first, second = Trainer(artifacts), Trainer(artifacts)
    fit(first, X, Y)
    assert second.step(X, Y).loss == Trainer(artifacts).step(X, Y).loss


def test_names_that_completion_shows() -> None:
    public = [n for n in dir(onnxtrain) if not n.startswith("_")]
    assert public == sorted(n for n in onnxtrain.__all__)
    assert not {"deprecated", "named", "options", "thresholds", "way_out"} & {*public}


def test_progress_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", out)
    fit(trainer, X, Y, validation=(X, Y), epochs=2, progress=True)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
