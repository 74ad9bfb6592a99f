"""Streams of rows that do not fit into memory, and transforms of batches."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import NonFiniteError, OnnxTrainError, ShapeError
from onnxtrain.manifest import TensorSpec
from onnxtrain.training import Trainer
from onnxtrain.training.data import as_source
from tests.artifacts.models import data

from .made import made, same

SPECS = [TensorSpec("x", "int64", ("batch",), "input")]


def pieces(n: int, size: int) -> Callable[[], Iterator[dict[str, np.ndarray]]]:
    """Return a function that gives the numbers below ``n`` in pieces."""
    return lambda: ({"x": np.arange(i, min(i + size, n))} for i in range(0, n, size))


def order(source: Any, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [b.arrays["x"].tolist() for b in source.batches(epoch, start)]


def stream(rows: Any, buffer: int = 32, prefetch: int = 2, **options: Any) -> Any:
    given = onnxtrain.Stream(rows, buffer=buffer, prefetch=prefetch)
    return as_source(given, SPECS, **{"batch_size": 8, **options})


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_every_row_once_in_batches(size: int, prefetch: int) -> None:
    plain = order(stream(pieces(100, size), prefetch=prefetch))
    assert plain == [list(range(i, min(i + 8, 100))) for i in range(0, 100, 8)]
    mixed = order(stream(pieces(100, size), prefetch=prefetch, shuffle=True))
    assert [len(b) for b in mixed] == [8] * 12 + [4]
    assert sorted(chain(*mixed)) == list(range(100))
    dropped = order(stream(pieces(100, size), prefetch=prefetch, drop_last=True))
    assert dropped == plain[:-1]


def test_order_depends_on_seed_and_epoch_only() -> None:
    def mixed(seed: int, epoch: int, size: int = 10) -> list[list[int]]:
        return order(stream(pieces(100, size), shuffle=True, seed=seed), epoch)

    assert mixed(0, 0) == mixed(0, 0)
    assert len({str(mixed(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    rest = order(stream(pieces(100, 10), shuffle=True), 1, start=5)
    assert rest == order(stream(pieces(100, 10), shuffle=True), 1)[5:]
    # Fixed once and for all: a run may be resumed with another version of numpy.
    assert mixed(0, 0)[0] == [16, 29, 8, 7, 34, 17, 36, 20]


def test_rows_travel_further_than_the_buffer() -> None:
    rows = [*chain(*order(stream(pieces(10_000, 100), buffer=1000, shuffle=True)))]
    moved = np.abs(np.array(rows) - np.arange(10_000))
    assert moved.max() > 1500
    assert moved.mean() > 200


def test_memory_is_that_of_the_buffer() -> None:
    """64 MB of rows through a buffer of 1 MB."""

    def rows() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(64):
            yield {"x": np.zeros(1 << 17, np.int64)}

    source = stream(rows, buffer=1 << 17, batch_size=1 << 12, shuffle=True)
    tracemalloc.start()
    count = sum(b.size for b in source.batches(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 64 << 17
    assert peak < 16 << 20


@pytest.mark.parametrize("kind", ["function", "list", "single rows", "npz", "csv", "wildcard"])
def test_all_kinds_of_streams_give_the_same_run(kind: str, tmp_path: Path) -> None:
    x, labels = data(40)
    parts = [slice(i, i + 10) for i in range(0, 40, 10)]
    given: Any = [{"x": x[p], "labels": labels[p]} for p in parts]
    paths = []
    for i, p in enumerate(parts):
        if kind == "csv":
            paths.append(tmp_path / f"{i}.csv")
            table = np.column_stack([x[p].astype(np.float64), labels[p]])
            names = ",".join([*(f"x.{j}" for j in range(6)), "label"])
            np.savetxt(paths[-1], table, delimiter=",", header=names, comments="", fmt="%.17g")
        else:
            paths.append(tmp_path / f"{i}.npz")
            np.savez(paths[-1], **given[i])
    rows = {
        "function": lambda epoch: iter(given),
        "list": given,
        "single rows": lambda: zip(x, labels, strict=True),
        "wildcard": str(tmp_path / "*.npz"),
    }.get(kind, paths)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False, "progress": False}
    expected = Trainer(made()).fit(x, labels, **options).losses
    assert Trainer(made()).fit(onnxtrain.Stream(rows), **options).losses == expected
    evaluation = Trainer(made()).evaluate(onnxtrain.Stream(rows), batch_size=8)
    assert evaluation == Trainer(made()).evaluate(x, labels, batch_size=8)


def test_resume_within_an_epoch_of_a_stream(tmp_path: Path) -> None:
    x, labels = data(60)
    rows = [(x[i : i + 7], labels[i : i + 7]) for i in range(0, 60, 7)]
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "progress": False}
    whole = Trainer(made())
    expected = whole.fit(onnxtrain.Stream(rows, buffer=20), **options).losses

    class Stop(onnxtrain.Callback):
        def on_step(self, run: Any, result: Any) -> None:
            if result.step == 12:
                run.stop = "enough"

    options["directory"] = tmp_path
    Trainer(made()).fit(onnxtrain.Stream(rows, buffer=20), callbacks=[Stop()], **options)
    trainer = Trainer(made())
    resumed = trainer.fit(onnxtrain.Stream(rows, buffer=20), resume=True, **options)
    assert resumed.losses == expected
    same(whole.state_dict(), trainer.state_dict())


def test_errors_of_a_stream_name_the_row(tmp_path: Path) -> None:
    x, labels = data(40)
    x[23, 2] = np.nan
    rows = [(x[i : i + 10], labels[i : i + 10]) for i in range(0, 40, 10)]
    with pytest.raises(NonFiniteError, match="in row 23\n"):
        Trainer(made()).fit(onnxtrain.Stream(rows), batch_size=8, progress=False)
    for i, (a, b) in enumerate(rows):
        np.savez(tmp_path / f"{i}.npz", x=a, labels=b)
    with pytest.raises(NonFiniteError, match=r"in .*2\.npz: row 3\n"):
        Trainer(made()).fit(onnxtrain.Stream(tmp_path / "*.npz"), batch_size=8, progress=False)


def test_errors_of_the_reader_reach_the_caller_and_end_the_thread() -> None:
    def broken() -> Iterator[dict[str, np.ndarray]]:
        yield {"x": np.arange(20)}
        raise RuntimeError("the disk is gone")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        order(stream(broken))
    batches = stream(pieces(10_000, 10), prefetch=2).batches(0)
    next(batches)
    batches.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([7], "must give tables, arrays or rows, got int\nhint: its arrays are x"),
        ("no/such/*.npz", r"no such file\nhint: Stream\('shards"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"different shapes: .*\nhint: pad"),
        (iter([]), None),
    ],
)
def test_streams_that_cannot_be_read(rows: Any, message: str | None) -> None:
    if message is None:
        assert order(stream(rows)) == []
        return
    with pytest.raises(OnnxTrainError, match=message):
        order(stream(rows))


def test_invalid_options_of_a_stream() -> None:
    with pytest.raises(OnnxTrainError, match="buffer must be at least 1, got 0"):
        onnxtrain.Stream([], buffer=0)
    with pytest.raises(OnnxTrainError, match="prefetch must not be negative, got -1"):
        onnxtrain.Stream([], prefetch=-1)


# -- transforms ----------------------------------------------------------------------------


def noise(batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch["x"] += rng.standard_normal(batch["x"].shape).astype(np.float32)
    return batch


def test_a_transform_changes_training_batches_only() -> None:
    x, labels = data(40)
    options: dict[str, Any] = {"batch_size": 40, "shuffle": False, "progress": False}
    options["validation"] = (x, labels)

    def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        batch["x"] *= 2
        return batch

    kept = x.copy()
    history = Trainer(made()).fit((x, labels), transform=double, **options)
    np.testing.assert_array_equal(x, kept)
    expected = Trainer(made()).fit((2 * x, labels), **options)
    assert history.losses == expected.losses
    assert history.epochs[0]["val_loss"] == expected.epochs[0]["val_loss"]


@pytest.mark.parametrize("streamed", [False, True])
def test_random_transforms_are_repeatable_and_resumed(streamed: bool, tmp_path: Path) -> None:
    x, labels = data(40)

    def given() -> Any:
        return onnxtrain.Stream([(x, labels)]) if streamed else (x, labels)

    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False, "transform": noise}
    whole = Trainer(made())
    expected = whole.fit(given(), **options).losses
    assert expected != Trainer(made()).fit(given(), **{**options, "transform": None}).losses
    assert expected != Trainer(made(), seed=1).fit(given(), **options).losses
    options["directory"] = tmp_path
    Trainer(made()).fit(given(), **{**options, "epochs": 1})
    trainer = Trainer(made())
    assert trainer.fit(given(), resume=True, **options).losses == expected
    same(whole.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("result", [None, {"x": 1}])
def test_a_transform_returns_the_batch(result: Any) -> None:
    with pytest.raises(ShapeError, match=r"transform must return a dict with x, labels, got .*\nh"):
        Trainer(made()).fit(data(8), transform=lambda batch: result, progress=False)
