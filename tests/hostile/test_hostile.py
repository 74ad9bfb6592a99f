"""Mutated files give correct results or named errors, fast."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.hostile.mutate import mutant
from tests.hostile.run import KINDS, Tally, mixed_cases, run
from tests.hostile.traps import Traps

FAILED_BEFORE = (
    *(237, 307, 312, 373, 3408, 4733, 4776, 5152, 6940, 7373, 7585, 7931, 8144, 20454, 20822),
    *(30374, 30591, 40686, 101204, 102013),
)


def test_mutants_are_deterministic() -> None:
    assert [mutant(seed) for seed in range(50)] == [mutant(seed) for seed in range(50)]


def cases(kind: str, seeds: Iterable[int]) -> list[str]:
    return [f"{kind}:{seed}" for seed in seeds]


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_some_models(first: int) -> None:
    tally = run(cases("model", range(first, first + 100)))
    assert not tally.bad, tally.report()
    assert tally.counts["accepted"] > 5
    assert tally.counts["refused"] > 5


def test_cases_that_failed_before() -> None:
    tally = run(cases("model", FAILED_BEFORE))
    assert not tally.bad, tally.report()


@pytest.mark.parametrize(("kind", "count"), [("data", 40), ("adapter", 20), ("folder", 12)])
def test_some_files_of_other_kinds(kind: str, count: int) -> None:
    for module in ("tokenizers", "jinja2", "PIL"):
        pytest.importorskip(module, reason="onnxtrain[text,images] is not installed")
    tally = run(cases(kind, range(count)))
    assert not tally.bad, tally.report()
    assert tally.counts["accepted"] > 2
    assert tally.counts["refused"] > 2


@pytest.mark.full
def test_some_replies_of_clients() -> None:
    tally = run(cases("reply", range(100)))
    assert not tally.bad, tally.report()


def test_a_long_run_has_cases_of_every_kind() -> None:
    shares = Counter(case.partition(":")[0] for case in mixed_cases(10_000, 0))
    assert shares.keys() == KINDS.keys()
    assert min(shares.values()) >= 500
    assert abs(sum(shares.values()) - 10_000) < 5


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 6000, 500))
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases(kind: str, first: int) -> None:
    tally = run(cases(kind, range(first, first + 500)))
    assert not tally.bad, tally.report()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_watch_sees_files_opened_outside(tmp_path: Path) -> None:
    traps = Traps(tmp_path)
    traps.touched()
    (traps.inside / "data.bin").read_bytes()
    assert not traps.touched()
    for name in ("link.bin", "hard.bin", "linked/secret.bin", "../outside/secret.bin"):
        with (traps.inside / name).open("rb"):
            pass
        assert traps.touched(), name
    assert not traps.touched()


def test_a_report_has_every_count_and_the_bad_cases() -> None:
    tally, other = Tally(), Tally()
    tally.add("model:1", "accepted", "")
    other.add("data:2", "raw", "KeyError")
    tally.join(other)
    lines = tally.report().splitlines()
    assert [line.split()[-1] for line in lines[:5]] == ["1", "0", "0", "0", "1"]
    assert lines[-1] == "data:2: raw: KeyError"
