"""Whole runs: data, schedules, records, early stopping, NaN, Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import NonFiniteError, OnnxTrainError, PrepareError, ShapeError
from onnxtrain.manifest import TensorSpec
from onnxtrain.optim import schedules
from onnxtrain.training import Callback, EarlyStopping, Run, StepResult, Trainer
from onnxtrain.training.data import as_source, held_out, shuffled
from onnxtrain.training.fit import CheckpointRotation
from onnxtrain.training.run_files import crc32c
from tests.artifacts.models import classifier, data, finished, graph, weight, with_norm
from tests.training.made import same

LOSS = [losses.LossTerm("cross_entropy", output="scores")]


def made(**options: object) -> Artifacts:
    settings = {"loss": LOSS, "optimizer": optim.Adam(lr=0.01), "metrics": ["accuracy"], **options}
    return build(classifier(), **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def artifacts() -> Artifacts:
    return made()


def quiet(trainer: Trainer, *args: object, **options: object):
    return trainer.fit(*args, progress=False, **options)  # type: ignore[arg-type]


# -- data -------------------------------------------------------------------------------


def test_shuffled_is_a_permutation_by_seed_and_epoch() -> None:
    orders = [shuffled(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert shuffled(50, 1, 2).tolist() == orders[5]
    # Fixed once and for all: a run may be resumed with another version of numpy.
    assert shuffled(8, 0, 0).tolist() == [3, 4, 0, 2, 6, 7, 1, 5]


def test_all_kinds_of_data_give_the_same_run(artifacts: Artifacts) -> None:
    x, labels = data(40)
    batches = [(x[i : i + 8], labels[i : i + 8]) for i in range(0, 40, 8)]
    named = [{"labels": b, "x": a} for a, b in batches]
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(labels))
    loader = torch.utils.data.DataLoader(tensors, batch_size=8)
    runs = []
    for given in (
        (x, labels),
        {"x": x, "labels": labels},
        batches,
        named,
        loader,
        lambda epoch: iter(batches),
        (torch.from_numpy(x), torch.from_numpy(labels)),
        tensors,
    ):
        history = quiet(Trainer(artifacts), given, epochs=2, batch_size=8, shuffle=False)
        assert len(history.steps) == 10
        runs.append(history.losses)
    assert all(losses_ == runs[0] for losses_ in runs)


def test_a_generator_function_without_arguments_is_called_once_per_epoch() -> None:
    x, labels = data(32)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, 32, 8):
            yield x[start : start + 8], labels[start : start + 8]

    expected = Trainer(made()).fit(lambda epoch: batches(), epochs=2, progress=False)
    assert Trainer(made()).fit(batches, epochs=2, progress=False).losses == expected.losses
    assert len(expected.losses) == 8


def test_a_loader_with_a_generator_is_seeded(artifacts: Artifacts) -> None:
    x, labels = (torch.from_numpy(a) for a in data(40))
    tensors = torch.utils.data.TensorDataset(x, labels)

    def run() -> list[float]:
        generator = torch.Generator()
        generator.seed()
        loader = torch.utils.data.DataLoader(tensors, 8, shuffle=True, generator=generator)
        return quiet(Trainer(artifacts, seed=2), loader, epochs=2).losses

    assert run() == run()


def test_short_batches_are_kept_or_dropped() -> None:
    x, specs = np.arange(10), [TensorSpec("x", "int64", ("batch",), "input")]
    sizes = [b.size for b in as_source((x,), specs, batch_size=4).batches(0)]
    assert sizes == [4, 4, 2]
    source = as_source({"x": x}, specs, batch_size=4, drop_last=True)
    assert len(source) == 2
    assert [b.arrays["x"].tolist() for b in source.batches(0, 1)] == [[4, 5, 6, 7]]
    assert len(as_source(x, specs, batch_size=4)) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.zeros(3), np.zeros(4)), "arrays have different lengths: x: 3, y: 4"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "arrays have different lengths: x: 3, y: 4"),
        ((np.zeros(3), np.float32(1)), "'y' is a scalar\nhint: axis 0 must be the samples"),
        ((np.zeros(0), np.zeros(0)), "the data has no samples"),
        (np.zeros(3), r"missing from the data: y\nhint: pass \(x, y\), or a dict"),
        ((1, 2, 3), "got 3 tensors, the model takes x, y"),
        ({"train": {"x": 1}, "test": {"x": 2}}, r"has splits: 'train', .*\n.*fit\(data\['train'\]"),
        (
            torch.utils.data.StackDataset(torch.zeros(3)),  # pyright: ignore[reportArgumentType]
            "single rows, not batches\nhint: .*DataLoad",
        ),
        (7, "data of type int is not supported"),
    ],
)
def test_unsupported_data(given: object, message: str) -> None:
    specs = [TensorSpec(n, "float32", ("batch",), "input") for n in "xy"]
    with pytest.raises(ShapeError, match=message):
        as_source(given, specs, batch_size=4)


@pytest.mark.parametrize("given", [[], iter([])])
def test_data_without_a_batch(artifacts: Artifacts, given: object) -> None:
    with pytest.raises(ShapeError, match="the data has no batch to train on"):
        quiet(Trainer(artifacts), given, epochs=1)


def test_an_iterator_has_one_epoch(artifacts: Artifacts) -> None:
    batches = [data(8, seed=i) for i in range(3)]
    assert len(quiet(Trainer(artifacts), iter(batches), epochs=1).steps) == 3
    with pytest.raises(ShapeError, match="can only be read in one epoch"):
        quiet(Trainer(artifacts), iter(batches), epochs=2)


def test_a_fraction_of_the_rows_for_validation(artifacts: Artifacts, tmp_path: Path) -> None:
    x, y = data(50)

    def run(validation: object, **options: object):
        trainer = Trainer(artifacts, seed=3)
        return quiet(trainer, (x, y), validation=validation, batch_size=8, **options)

    history = run(0.2, epochs=2, directory=tmp_path / "a")
    assert len(history.steps) == 2 * 5  # 40 rows
    held = held_out(50, 10, seed=3)
    assert len(set(held)) == 10
    rest = np.delete(np.arange(50), held)
    expected = Trainer(artifacts, seed=3).fit(
        (x[rest], y[rest]),
        validation=(x[held], y[held]),
        batch_size=8,
        epochs=2,
        progress=False,
    )
    assert history.losses == expected.losses
    assert [e["val_loss"] for e in history.epochs] == [e["val_loss"] for e in expected.epochs]
    resumed = Trainer(artifacts, seed=3)
    more = resumed.fit((x, y), directory=tmp_path / "a", resume=True, epochs=3, progress=False)
    whole = run(0.2, epochs=3)
    assert more.epochs[-1]["val_loss"] == whole.epochs[-1]["val_loss"]


@pytest.mark.parametrize("fraction", [0, 1, 20, -0.5, True, "1.5", float("nan")])
def test_a_fraction_is_between_0_and_1(artifacts: Artifacts, fraction: object) -> None:
    with pytest.raises(OnnxTrainError, match=r"between 0 and 1, got .*\nhint: validation=0\.2"):
        Trainer(artifacts).fit(data(8), validation=fraction)


def test_a_fraction_of_batches_is_refused(artifacts: Artifacts) -> None:
    with pytest.raises(OnnxTrainError, match=r"not of a list\nhint: fit\(data, validation=other"):
        Trainer(artifacts).fit([data(8)], validation=0.5)
    with pytest.raises(ShapeError, match=r"validation=0\.01 of 8 samples leaves none to validate"):
        Trainer(artifacts).fit(data(8), validation=0.01)


def test_a_fixed_batch_size_drops_the_last_batch() -> None:
    trainer = Trainer(made(dims={"batch": 16}))
    history = quiet(trainer, data(40), epochs=1, validation=data(35))
    assert len(history.steps) == 2
    assert trainer.evaluate(data(35)).samples == 32


# -- the course of a run ----------------------------------------------------------------


def test_learning(artifacts: Artifacts) -> None:
    trainer = Trainer(artifacts)
    history = quiet(trainer, data(512), epochs=6, validation=data(200, seed=1))
    assert history.stopped == ""
    assert [r["epoch"] for r in history.epochs] == [1, 2, 3, 4, 5, 6]
    assert history.epochs[-1]["val_accuracy"] > 0.9 > history.epochs[0]["val_accuracy"]
    assert history.best is not None
    assert history.best["val_loss"] == min(r["val_loss"] for r in history.epochs)
    evaluation = trainer.evaluate(data(200, seed=1))
    assert float(evaluation) == pytest.approx(history.epochs[-1]["val_loss"])
    assert evaluation.metrics["accuracy"] == pytest.approx(history.epochs[-1]["val_accuracy"])


def test_means_are_over_samples(artifacts: Artifacts) -> None:
    trainer = Trainer(artifacts)
    x, labels = data(10)
    evaluation = trainer.evaluate((x, labels), batch_size=4)
    assert evaluation.samples == 10
    assert evaluation.loss == pytest.approx(trainer.evaluate_batch(x, labels).loss, rel=1e-5)
    with pytest.raises(ShapeError, match="the data has no batch to evaluate"):
        trainer.evaluate([])


def test_perplexity_is_averaged_by_its_logarithm() -> None:
    trainer = Trainer(made(metrics=["perplexity"]))
    x, labels = data(10)
    evaluation = trainer.evaluate((x, labels), batch_size=4)
    assert evaluation.metrics["perplexity"] == pytest.approx(np.exp(evaluation.loss), rel=1e-5)


def test_schedules(artifacts: Artifacts) -> None:
    trainer = Trainer(artifacts)
    history = quiet(trainer, data(40), epochs=2, batch_size=10, schedule="cosine", warmup=2)
    expected = schedules.resolve_schedule("cosine", total=8, warmup=2)
    assert [r["lr"] for r in history.steps] == [expected.lr(0.01, s) for s in range(1, 9)]
    assert trainer.lr == 0.01
    with pytest.raises(PrepareError, match="unknown schedule"):
        quiet(trainer, data(40), schedule="cosinus")


def test_reduce_on_plateau(artifacts: Artifacts) -> None:
    schedule = schedules.ReduceOnPlateau(patience=0, threshold=10.0)
    history = quiet(Trainer(artifacts), data(16), epochs=4, batch_size=16, schedule=schedule)
    rates = [r["lr"] for r in history.steps]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.0001])


def test_accumulated_steps_end_with_the_epoch() -> None:
    trainer = Trainer(made(accumulate=3))
    history = quiet(trainer, data(32), epochs=2, batch_size=8, schedule="linear")
    assert trainer.global_step == 4
    assert [r["step"] for r in history.steps] == [1, 1, 1, 2, 3, 3, 3, 4]
    rates = [r["lr"] for r in history.steps]
    assert rates[0] == rates[2] > rates[3] > rates[4]


def test_early_stopping(artifacts: Artifacts) -> None:
    history = quiet(
        Trainer(artifacts), data(16), epochs=10, callbacks=[EarlyStopping(2, min_delta=9.0)]
    )
    assert history.stopped == "no improvement over epoch 1 for 2 epochs"
    assert len(history.epochs) == 3
    history = quiet(Trainer(artifacts), data(16), epochs=3, patience=1, monitor="accuracy")
    assert history.best is not None
    with pytest.raises(
        OnnxTrainError, match=r"unknown monitor: 'val_f1' \(expected one of loss, accuracy\)"
    ):
        quiet(Trainer(artifacts), data(16), epochs=3, monitor="val_f1")


def test_callbacks(artifacts: Artifacts) -> None:
    seen: list[str] = []

    class Watch(Callback):
        def on_start(self, run: Run) -> None:
            seen.append("start")

        def on_step(self, run: Run, result: StepResult) -> None:
            seen.append(f"step {result.step}")
            if result.step == 3:
                run.stop = "seen enough"

        def on_end(self, run: Run) -> None:
            seen.append("end")

    def epoch(run: Run, record: dict) -> None:
        seen.append(f"epoch {record['epoch']} of {run.options.epochs}")

    history = quiet(
        Trainer(artifacts), data(16), epochs=9, batch_size=8, callbacks=[Watch(), epoch]
    )
    assert history.stopped == "seen enough"
    assert seen == ["start", "step 1", "step 2", "epoch 1 of 9", "step 3", "end"]
    with pytest.raises(OnnxTrainError, match="not a callback: 7"):
        quiet(Trainer(artifacts), data(16), callbacks=[7])


# -- files ------------------------------------------------------------------------------


def test_records(artifacts: Artifacts, tmp_path: Path) -> None:
    history = quiet(
        Trainer(artifacts),
        data(20),
        epochs=2,
        batch_size=8,
        validation=data(9, seed=1),
        directory=tmp_path / "run",
        tensorboard=True,
    )
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {
        "metrics.csv",
        "metrics.jsonl",
        "loss.png",
        "events",
        "checkpoints",
        ".lock",
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r for r in rows if r["kind"] == "step"] == history.steps
    assert [r for r in rows if r["kind"] == "epoch"] == history.epochs
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        "kind",
        "epoch",
        "step",
        "lr",
        "loss",
        "accuracy",
        "val_loss",
        "val_accuracy",
    ]
    assert [float(r["loss"]) for r in table if r["kind"] == "step"] == history.losses
    assert [r["val_loss"] for r in table if r["kind"] == "step"] == [""] * 6
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-000000003.safetensors", "step-000000006.safetensors"]
    (events,) = (folder / "events").iterdir()
    records = read_events(events.read_bytes())
    assert [(s, t) for s, t, _ in records][:2] == [(1, "step/lr"), (1, "step/loss")]
    values = [v for _, t, v in records if t == "step/loss"]
    assert values == pytest.approx(history.losses)


def read_events(content: bytes) -> list[tuple[int, str, float]]:
    """Read an event file by the book; every checksum is checked."""

    def unmasked(data: bytes) -> int:
        value = (struct.unpack("<I", data)[0] - 0xA282EAD8) & 0xFFFFFFFF
        return ((value >> 17) | (value << 15)) & 0xFFFFFFFF

    records, at = [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        assert unmasked(content[at + 8 : at + 12]) == crc32c(content[at : at + 8])
        event = content[at + 12 : at + 12 + length]
        assert unmasked(content[at + 12 + length : at + 16 + length]) == crc32c(event)
        at += 16 + length
        assert event[0] == 0x09
        if event[9] == 0x10:  # step; below 128 here, so one byte
            step, summary = event[10], event[13 if event[12] < 128 else 14 :]
            while summary:
                assert summary[0] == 0x0A
                value = summary[2 : 2 + summary[1]]
                tag = value[2 : 2 + value[1]].decode()
                records.append((step, tag, struct.unpack("<f", value[3 + value[1] :])[0]))
                summary = summary[2 + summary[1] :]
    return records


def test_checkpoint_rotation(artifacts: Artifacts, tmp_path: Path) -> None:
    quiet(
        Trainer(artifacts),
        data(80),
        epochs=1,
        batch_size=8,
        directory=tmp_path,
        checkpoint_every=2,
        keep=2,
    )
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-000000008.safetensors", "step-000000010.safetensors"]


def test_a_directory_contains_one_run(artifacts: Artifacts, tmp_path: Path) -> None:
    quiet(Trainer(artifacts), data(8), epochs=1, directory=tmp_path)
    with pytest.raises(OnnxTrainError, match="already contains a run: step-000000001"):
        quiet(Trainer(artifacts), data(8), epochs=1, directory=tmp_path)
    with pytest.raises(OnnxTrainError, match="require directory="):
        quiet(Trainer(artifacts), data(8), epochs=1, resume=True)


# -- trouble ----------------------------------------------------------------------------


def logarithm() -> Artifacts:
    """y = log(x w): NaN as soon as x w is negative."""
    op = graph()
    x = op.input("x", *_float(["batch", 2]))
    w = weight(op, "w", np.ones((2, 1), np.float32))
    return build(finished(op, y=op.Log(op.MatMul(x, w))), loss="mse", optimizer=optim.SGD(lr=0.1))


def _float(dims: list) -> tuple:
    import onnx_ir as ir

    return ir.DataType.FLOAT, dims


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_nan_loss(layout: str) -> None:
    good = (np.ones((2, 2), np.float32), np.zeros((2, 1), np.float32))
    bad = (np.array([[1, 1], [-9, 1]], np.float32), good[1])
    trainer = Trainer(logarithm(), layout=layout)
    with pytest.raises(NonFiniteError) as caught:
        quiet(trainer, [good, bad, good])
    text = str(caught.value)
    assert text.startswith("the loss of step 2 is nan\n  first tensor that is not finite: the loss")
    assert "hint: debug_nan=True" in text
    assert trainer.global_step == 1
    assert np.isfinite(trainer.parameters["w"]).all()
    with pytest.raises(NonFiniteError, match=r"node '\w*' \(Log\) computes .*1 NaN") as caught:
        quiet(trainer, [bad], debug_nan=True)
    assert "from 'MatMul' (float32[2, 1], -" in str(caught.value)
    nan = (np.full((2, 2), np.nan, np.float32), good[1])
    for debug in (False, True):
        with pytest.raises(NonFiniteError) as caught:
            quiet(trainer, [nan], debug_nan=debug)
        _, first, rows, hint = str(caught.value).splitlines()
        assert first.endswith("not finite: 'x' of the batch (float32[2, 2], 4 NaN, 0 infinite)")
        assert rows == "  in rows 0, 1 of the batch"
        assert hint.startswith("hint: remove these rows or replace the values")
    trainer.parameters["w"] = [[np.inf], [1]]
    with pytest.raises(NonFiniteError, match="not finite: parameter 'w'"):
        quiet(trainer, [good])


@pytest.mark.parametrize(
    ("layout", "optimizer", "accumulate"),
    [
        ("fused", "adamw", 1),
        ("separate", "adamw", 1),
        ("separate", "adamw", 2),
        ("vector", "adamw", 1),
        ("vector", "sgd", 1),
    ],
)
def test_step_with_nan_changes_nothing(layout: str, optimizer: str, accumulate: int) -> None:
    """Weights, state and running statistics stay; the next step is the one without the bad one."""
    artifacts = build(
        with_norm(training=True), loss="mse", optimizer=optimizer, accumulate=accumulate, ema=0.9
    )
    rng = np.random.default_rng(0)
    good = [
        (
            rng.standard_normal((6, 4, 5)).astype(np.float32),
            rng.standard_normal((6, 3)).astype(np.float32),
        )
        for _ in range(4)
    ]
    trainer, plain = (Trainer(artifacts, layout=layout) for _ in range(2))
    for batch in good:
        for bad in (np.nan, np.inf):
            x = batch[0].copy()
            x[0, 0, 0] = bad
            before, step = trainer.state_dict(), trainer.global_step
            result = trainer.step(x, batch[1])
            assert not np.isfinite(result.loss)
            assert not result.updated
            assert trainer.global_step == step
            same(before, trainer.state_dict())
        assert trainer.step(*batch).loss == plain.step(*batch).loss
    same(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_step_with_an_infinite_input_and_a_finite_loss_changes_nothing(layout: str) -> None:
    """tanh hides the infinity from the loss, not from the gradient of the weight before it."""
    trainer = Trainer(made(), layout=layout)
    x, y = data(8)
    x[3, 1] = np.inf
    before = trainer.state_dict()
    result = trainer.step(x, y)
    assert np.isfinite(result.loss) == (not np.isnan(trainer.predict(x)["scores"]).any())
    assert not result.updated
    same(before, trainer.state_dict())


def test_nan_names_the_row_of_the_data(tmp_path: Path) -> None:
    """Rows are counted in the data as it was given, not in the shuffled batch; CSV has lines."""
    x, labels = data(40)
    x[[17, 31], 2] = np.nan
    for given, place in (((x, labels), "rows 17, 31"), (tmp_path / "a.csv", "lines 19, 33")):
        if isinstance(given, Path):
            table = np.hstack([x, labels[:, None]])
            names = ",".join([*(f"x{i}" for i in range(6)), "labels"])
            np.savetxt(given, table, delimiter=",", header=names, comments="")
            place = f"{given}: {place}"
        for seed in (0, 1):
            with pytest.raises(NonFiniteError) as caught:
                quiet(Trainer(made(), seed=seed), given, batch_size=40)
            assert str(caught.value).splitlines()[2] == f"  in {place}"


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_nan_gradient_of_a_finite_loss(layout: str) -> None:
    """The square root of zero is finite, its derivative is not."""
    op = graph()
    x = op.input("x", *_float(["batch", 1]))
    y = op.Sqrt(op.Mul(x, weight(op, "w", np.ones((1, 1), np.float32))))
    artifacts = build(finished(op, y=y), loss="mse", optimizer="sgd", train="w")
    batch = (np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32))
    trainer = Trainer(artifacts, layout=layout)
    with pytest.raises(NonFiniteError, match="step 1 has a finite loss, but its update is not"):
        quiet(trainer, [batch], debug_nan=True)
    assert trainer.global_step == 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_interrupt_saves_and_stops(tmp_path: Path, accumulate: int) -> None:
    artifacts = made(accumulate=accumulate)

    class Press(Callback):
        def on_step(self, run: Run, result: StepResult) -> None:
            if run.batch == 4:
                os.kill(os.getpid(), signal.SIGINT)

    before, press = signal.getsignal(signal.SIGINT), Press()
    options = {"epochs": 3, "batch_size": 8, "directory": tmp_path, "callbacks": [press]}
    with pytest.raises(KeyboardInterrupt) as caught:
        quiet(Trainer(artifacts), data(96), **options)
    assert signal.getsignal(signal.SIGINT) is before
    last = CheckpointRotation(tmp_path / "checkpoints").newest()
    head, hint = str(caught.value).splitlines()
    assert head.endswith(f"; saved {last}")
    assert hint == f"hint: fit(..., directory={str(tmp_path)!r}, resume=True) continues"
    whole = quiet(Trainer(artifacts), data(96), epochs=3, batch_size=8)
    rest = quiet(
        Trainer(artifacts), data(96), epochs=3, batch_size=8, directory=tmp_path, resume=True
    )
    assert rest.losses == whole.losses
    assert rest.epochs == whole.epochs


def test_interrupt_without_a_directory() -> None:
    """The caller is told that nothing was saved; the trainer has the weights of the last step."""

    def press(run: Run, result: StepResult) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    callback = Callback()
    callback.on_step = press  # type: ignore[method-assign]
    trainer = Trainer(made())
    with pytest.raises(
        KeyboardInterrupt, match=r"after step 1; nothing was saved\nhint: trainer\."
    ):
        quiet(trainer, data(96), epochs=3, batch_size=8, callbacks=[callback])
    assert trainer.global_step == 1


def test_interrupted_script_exits_with_130() -> None:
    """The next line of a script does not run."""
    script = (
        "import os, signal, onnxtrain\n"
        "from onnxtrain.examples import digits_data, digits_model\n"
        "class Press(onnxtrain.Callback):\n"
        "    def on_step(self, run, result): os.kill(os.getpid(), signal.SIGINT)\n"
        "art = onnxtrain.build(digits_model(), loss='cross_entropy', optimizer='sgd')\n"
        "trainer = onnxtrain.Trainer(art)\n"
        "trainer.fit(digits_data(64), callbacks=[Press()], progress=False)\n"
        "print('exported')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "exported" not in done.stdout
    assert "KeyboardInterrupt: fit was interrupted after step 1; nothing was saved" in done.stderr


# -- what is shown ----------------------------------------------------------------------


# -- a schedule as a function of the step -----------------------------------------------


def test_a_schedule_may_be_a_function_of_the_step(artifacts: Artifacts) -> None:
    trainer = Trainer(artifacts)
    history = quiet(trainer, data(40), epochs=2, batch_size=10, schedule=lambda step: 0.01 / step)
    assert [r["lr"] for r in history.steps] == [0.01 / step for step in range(1, 9)]
    assert trainer.lr == 0.01


def test_a_schedule_function_is_given_again_to_a_resumed_run(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    options = {"batch_size": 10, "directory": tmp_path / "run"}

    def schedule(step: int) -> float:
        return 0.01 / step

    whole = Trainer(artifacts)
    expected = quiet(whole, data(40), epochs=2, batch_size=10, schedule=schedule).losses
    quiet(Trainer(artifacts), data(40), epochs=1, schedule=schedule, **options)
    with pytest.raises(PrepareError, match=r"schedule is a function.*\nhint: .*schedule=function"):
        quiet(Trainer(artifacts), data(40), epochs=2, resume=True, **options)
    trainer = Trainer(artifacts)
    history = quiet(trainer, data(40), epochs=2, resume=True, schedule=schedule, **options)
    assert history.losses == expected
    assert [r["lr"] for r in history.steps] == [0.01 / step for step in range(1, 9)]
    same(whole.state_dict(), trainer.state_dict())


def test_options_that_a_schedule_does_not_use_are_errors(artifacts: Artifacts) -> None:
    with pytest.raises(PrepareError, match="warmup= has no effect on a function\nhint: "):
        quiet(Trainer(artifacts), data(40), schedule=lambda step: 0.1, warmup=3)
    with pytest.raises(OnnxTrainError, match=r"lr= has no effect: .*\nhint: pass only schedule="):
        quiet(Trainer(artifacts), data(40), schedule=lambda step: 0.1, lr=0.1)
    with pytest.raises(OnnxTrainError, match="lr must be finite and not negative, got -1"):
        quiet(Trainer(artifacts), data(40), schedule=lambda step: -1)


def test_warmup_of_a_schedule_object(artifacts: Artifacts) -> None:
    schedule = schedules.Step(step_size=2, gamma=0.5)
    history = quiet(Trainer(artifacts), data(48), batch_size=8, schedule=schedule, warmup=2)
    rates = [r["lr"] for r in history.steps]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.01, 0.005, 0.005])
