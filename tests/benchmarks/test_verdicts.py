"""Verdicts of the benchmark harness on measurements."""

from __future__ import annotations

import math

import pytest
from benchmarks.peers import PEERS
from benchmarks.workloads import WORKLOADS

from benchmarks import verdicts

REFERENCE = [2.0, 1.9, 1.8, 1.7]


def test_equal_losses_agree() -> None:
    assert verdicts.disagreement(REFERENCE, [x + 1e-3 for x in REFERENCE]) is None


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.0, 2.0, 2.0, 2.0], "loss of step 2 is 2.00000 instead of 1.90000"),  # no update
        ([2.0, 1.8, 1.6, 1.4], "loss of step 2"),  # twice the update
        ([2.1, 1.9, 1.8, 1.7], "loss of step 1"),  # other weights or data
        ([2.0, 1.9, math.nan, 1.7], "loss of step 3 is nan"),
        ([2.0, 1.9], "2 losses instead of 4"),
    ],
)
def test_wrong_losses_are_found(losses: list[float], said: str) -> None:
    why = verdicts.disagreement(REFERENCE, losses)
    assert why is not None
    assert why.startswith(said)


def test_a_reference_that_stands_still_says_nothing() -> None:
    assert verdicts.moves(REFERENCE)
    assert not verdicts.moves([2.0, 2.0, 1.9999, 2.0])


def test_ratio_is_taken_within_rounds() -> None:
    """A round in which the machine was busy has the same ratio as a quiet one."""
    spread = verdicts.ratio([1.0, 10.0, 1.2], [2.0, 20.0, 2.0])
    assert spread == verdicts.Spread(0.5, 0.5, 0.6)


@pytest.mark.parametrize(
    ("measured", "allowed", "said"),
    [
        (0.9, 1.0, "met"),
        (1.0, 1.0, "met"),
        (1.1, 1.0, "missed by 10%"),
        (0.9, 0.45, "missed by 100%"),
        (9.0, None, ""),
    ],
)
def test_verdict(measured: float, allowed: float | None, said: str) -> None:
    assert verdicts.verdict(measured, allowed) == said
    assert verdicts.missed(measured, allowed) is said.startswith("missed")


def test_targets_name_known_workloads_and_engines() -> None:
    times = verdicts.targets()["time"]
    assert set(times) == set(WORKLOADS)
    for row in times.values():
        assert set(row) == set(PEERS) - {"onnxtrain"}
