"""Damaged models are accepted and right, or refused by name: never more, never slowly."""

from __future__ import annotations

import pytest

from tests.hostile.mutate import mutant
from tests.hostile.run import run


def test_mutants_are_the_same_each_time():
    assert [mutant(seed) for seed in range(50)] == [mutant(seed) for seed in range(50)]


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_some_mutants(first: int):
    tally = run(range(first, first + 100))
    assert not tally.bad, "\n".join(tally.bad)
    assert tally.counts["accepted"] > 5
    assert tally.counts["refused"] > 5


def test_mutants_that_once_were_not():
    tally = run([307, 312, 373, 20454, 20822])
    assert not tally.bad, "\n".join(tally.bad)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_many_mutants(first: int):
    tally = run(range(first, first + 500))
    assert not tally.bad, "\n".join(tally.bad)
