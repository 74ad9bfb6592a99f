"""Thresholds: each is documented, and its nets lie on both sides of it."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from benchmarks.threshold_nets import CASES, CUDA_SIDES
from benchmarks.thresholds import Point

from benchmarks import thresholds as command
from onnxtrain import thresholds

NAMES = [n for n in vars(thresholds) if n.isupper()]


def test_measured_thresholds_exist() -> None:
    assert {*CASES, *CUDA_SIDES} <= set(NAMES)


def test_every_threshold_says_what_happens_at_it() -> None:
    body = ast.parse(Path(thresholds.__file__).read_text()).body
    documented = [
        node.targets[0].id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
    ]
    assert documented == NAMES


@pytest.mark.parametrize("name", CASES)
def test_nets_lie_on_both_sides_of_the_threshold(name: str) -> None:
    case, value = CASES[name], getattr(thresholds, name)
    sizes = list(case.nets)
    assert sizes == sorted(sizes)
    assert sizes[0] < value < sizes[-1]
    assert value in sizes
    first, second = command.trainers(name, case, case.nets[sizes[0]]())
    assert first.step_models != second.step_models
    assert getattr(thresholds, name) == value


def test_a_net_with_the_same_step_is_an_error() -> None:
    case = CASES["REPEATED_POSITIONS"]
    net = CASES["NARROW_CHANNELS"].nets[4]()
    with pytest.raises(ValueError, match="REPEATED_POSITIONS: the net has the same step"):
        command.trainers("REPEATED_POSITIONS", case, net)


def test_the_table_has_a_row_for_each_size() -> None:
    name = "REPEATED_POSITIONS"
    points = [command.measure(name, s, rounds=1, seconds=0.001) for s in CASES[name].nets]
    head, marks, *rows = command.table({name: points}).splitlines()
    assert head.startswith(
        "| threshold | its variant is used | crosses 1 there | size | with it, ms |"
    )
    assert marks.count("---") == head.count("|") - 1 == 7
    assert [r.split(" | ")[3] for r in rows] == ["16", "32", "64"]
    assert rows[0].startswith(f"| `{name}` | up to 32 positions |")
    ratio = float(rows[0].split(" | ")[6].split()[0])
    assert ratio == pytest.approx(points[0].used[0] / points[0].unused[0], abs=0.006)


@pytest.mark.parametrize(
    ("side", "ratios", "said"),
    [
        ("up to", (0.8, 0.9, 1.1), "yes"),
        ("up to", (0.8, 1.04, 0.96), "within noise"),
        ("up to", (1.0, 1.04, 1.1), "within noise"),
        ("up to", (0.98, 1.04, 0.96), "no difference"),
        ("up to", (0.8, 1.2, 1.3), "**no**: costs at 8"),
        ("up to", (0.8, 0.7, 0.6), "**no**: would pay at 16"),
        ("below", (0.8, 1.2, 1.3), "yes"),
        ("from", (1.2, 0.9, 0.8), "yes"),
        ("from", (0.8, 1.1, 0.9), "**no**: costs at 8, would pay at 4"),
    ],
)
def test_verdicts(side: str, ratios: tuple[float, ...], said: str) -> None:
    points = [Point(s, [r], [1.0]) for s, r in zip((4, 8, 16), ratios, strict=True)]
    assert command.verdict(side, 8, points) == said
