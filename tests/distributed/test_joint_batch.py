"""Several workers compute what one process computes with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.text.models import genai_folder, llama

from . import nets
from .pool import Pool

NETS = ("mlp", "cnn", "transformer", "lstm", "lora")
QUICK = {("mlp", 3, "everything", True), ("mlp", 2, "plain", False), ("lora", 2, "plain", False)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in (
        (name, workers, options, shard)
        for name in NETS
        for workers in (2, 3)
        for options in ("plain", "everything")
        for shard in (False, True)
    )
]


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the norm of the difference relative to that of the values."""
    assert a.keys() == b.keys()
    difference = sum(np.square(a[n].astype(float) - b[n]).sum() for n in a)
    return float(np.sqrt(difference / sum(np.square(b[n].astype(float)).sum() for n in b)))


def of_weights(result: dict[str, Any]) -> dict[str, np.ndarray]:
    return {n: a for n, a in result["state"].items() if not n.startswith("optim/")}


@pytest.mark.parametrize(("name", "workers", "options", "shard"), CASES)
def test_workers_equal_one_process(
    name: str, workers: int, options: str, shard: bool, pool: Pool, tmp_path: Path
) -> None:
    built = nets.artifacts(name, everything=options == "everything")
    built.save(tmp_path / "art")
    one = nets.train(str(tmp_path / "art"), name)
    first, *others = pool.run(
        workers, "tests.distributed.nets.in_a_worker", str(tmp_path / "art"), name, shard
    )
    if isinstance(first, Exception):
        raise first
    assert len(first["losses"]) == 21
    np.testing.assert_allclose(first["losses"], one["losses"], rtol=1e-6)
    if options == "plain":
        np.testing.assert_allclose(first["norms"], one["norms"], rtol=1e-5)
    assert distance(of_weights(first), of_weights(one)) < 1e-6
    assert distance(first["state"], one["state"]) < 1e-5
    for other in others:  # every worker has the same weights, to the bit
        for key, value in of_weights(first).items():
            np.testing.assert_array_equal(other["state"][key], value)
    assert first["layout"] == ("separate" if shard or options == "everything" else "vector")
    if shard and options == "everything":  # one process runs the same models
        assert sum(r["memory"] for r in (first, *others)) < workers * one["memory"]


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.full) for n in NETS[1:])]
)
def test_a_file_in_ddp_equals_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    file = nets.file(name, tmp_path)
    (one,) = pool.run(1, "tests.distributed.nets.as_torch", file, name)
    two = pool.run(2, "tests.distributed.nets.as_torch", file, name)
    for result in (one, *two):
        if isinstance(result, Exception):
            raise result
        assert distance(result, one) < 1e-6


def test_synchronized_batch_norm_has_the_statistics_of_all_workers(
    pool: Pool, tmp_path: Path
) -> None:
    nets.normalized(str(tmp_path))
    task = "tests.distributed.nets.synchronized"
    (one,) = pool.run(1, task, str(tmp_path), True)
    assert any("running_var" in n for n in one)
    for result in pool.run(3, task, str(tmp_path), True):
        if isinstance(result, Exception):
            raise result
        assert distance(result, one) < 1e-6
    apart, _ = pool.run(2, task, str(tmp_path), False)
    assert distance(apart, one) > 1e-3


def test_finetune_weighs_parts_by_their_tokens(pool: Pool, tmp_path: Path) -> None:
    folder = genai_folder(tmp_path / "model", llama(layers=1))
    (one,) = pool.run(1, "tests.distributed.nets.finetuned", str(folder), str(tmp_path / "one"))
    first, second = pool.run(
        2, "tests.distributed.nets.finetuned", str(folder), str(tmp_path / "two")
    )
    np.testing.assert_allclose(first[0], one[0], rtol=1e-6)
    assert first == (second[0], one[1])
    assert second[1] == []


@pytest.mark.parametrize("everything", [False, True])
def test_parts_that_are_suddenly_unequal_count_by_their_rows(
    everything: bool, pool: Pool, tmp_path: Path
) -> None:
    nets.artifacts("mlp", everything=everything).save(tmp_path / "art")
    task = "tests.distributed.nets.uneven"
    (one,) = pool.run(1, task, str(tmp_path))
    for losses, state in pool.run(2, task, str(tmp_path)):
        np.testing.assert_allclose(losses, one[0], rtol=1e-6)
        assert distance(state, one[1]) < 1e-5


@pytest.mark.parametrize("numbers", [(2, 3, 1), (1, 2, 2)])
def test_a_run_continues_with_another_number_of_workers(
    numbers: tuple[int, ...], pool: Pool, tmp_path: Path
) -> None:
    nets.artifacts("mlp").save(tmp_path / "art")
    task = "tests.distributed.nets.continued"
    (whole,) = pool.run(1, task, str(tmp_path), str(tmp_path / "whole"), 0, False)
    state: dict[str, np.ndarray] = {}
    for workers, stop_at in zip(numbers, (7, 13, 0), strict=True):  # in epochs of three steps
        arguments = (str(tmp_path), str(tmp_path / "run"), stop_at, workers == 2)
        state, *_ = pool.run(workers, task, *arguments)
    weights = [n for n in whole if not n.startswith("optim/")]
    assert distance(*({n: s[n] for n in weights} for s in (state, whole))) < 1e-6
    assert distance(state, whole) < 1e-5
