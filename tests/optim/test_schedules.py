"""Schedules against torch.optim.lr_scheduler, step by step."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler as T

from onnxtrain.errors import PrepareError
from onnxtrain.optim import schedules as S

BASE = 0.3
STEPS = 60

CASES: dict[str, tuple[S.Schedule, Callable]] = {
    "constant": (S.Constant(), lambda o: T.LambdaLR(o, lambda t: 1.0)),
    "constant-factor": (S.Constant(0.5), lambda o: T.LambdaLR(o, lambda t: 0.5)),
    "linear": (
        S.Linear(40, start=1.0, end=0.1),
        lambda o: T.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=40),
    ),
    "linear-up": (
        S.Linear(13, start=0.2, end=1.0),
        lambda o: T.LinearLR(o, start_factor=0.2, end_factor=1.0, total_iters=13),
    ),
    "cosine": (S.Cosine(60, eta_min=0.01), lambda o: T.CosineAnnealingLR(o, 60, eta_min=0.01)),
    "cosine-restarts": (
        S.CosineRestarts(10, eta_min=0.02),
        lambda o: T.CosineAnnealingWarmRestarts(o, 10, eta_min=0.02),
    ),
    "cosine-restarts-longer": (
        S.CosineRestarts(5, mult=2),
        lambda o: T.CosineAnnealingWarmRestarts(o, 5, T_mult=2),
    ),
    "polynomial": (S.Polynomial(45, power=2.5), lambda o: T.PolynomialLR(o, 45, power=2.5)),
    "step": (S.Step(7, gamma=0.6), lambda o: T.StepLR(o, 7, gamma=0.6)),
    "multi-step": (
        S.MultiStep((10, 25, 26), gamma=0.3),
        lambda o: T.MultiStepLR(o, [10, 25, 26], gamma=0.3),
    ),
    "exponential": (S.Exponential(0.93), lambda o: T.ExponentialLR(o, 0.93)),
    "cyclic": (
        S.Cyclic(0.05, step_size_up=7),
        lambda o: T.CyclicLR(o, 0.05, BASE, step_size_up=7, cycle_momentum=False),
    ),
    "cyclic-half": (
        S.Cyclic(0.05, step_size_up=4, step_size_down=9, mode="triangular2"),
        lambda o: T.CyclicLR(
            o, 0.05, BASE, 4, step_size_down=9, mode="triangular2", cycle_momentum=False
        ),
    ),
    "cyclic-exponential": (
        S.Cyclic(0.05, step_size_up=5, mode="exp_range", gamma=0.97),
        lambda o: T.CyclicLR(o, 0.05, BASE, 5, mode="exp_range", gamma=0.97, cycle_momentum=False),
    ),
    "one-cycle": (
        S.OneCycle(60),
        lambda o: T.OneCycleLR(o, BASE, total_steps=60, cycle_momentum=False),
    ),
    "one-cycle-linear": (
        S.OneCycle(60, pct_start=0.2, anneal_strategy="linear", div_factor=10.0),
        lambda o: T.OneCycleLR(
            o,
            BASE,
            total_steps=60,
            pct_start=0.2,
            anneal_strategy="linear",
            div_factor=10.0,
            cycle_momentum=False,
        ),
    ),
    "one-cycle-three-phases": (
        S.OneCycle(60, three_phase=True, final_div_factor=100.0),
        lambda o: T.OneCycleLR(
            o,
            BASE,
            total_steps=60,
            three_phase=True,
            final_div_factor=100.0,
            cycle_momentum=False,
        ),
    ),
    "warmup": (
        S.Warmup(12, S.Exponential(0.9), start=0.25),
        lambda o: T.SequentialLR(
            o,
            [T.LinearLR(o, start_factor=0.25, total_iters=12), T.ExponentialLR(o, 0.9)],
            milestones=[12],
        ),
    ),
    "chain": (
        S.Chain((S.Constant(0.1), S.Step(4), S.Exponential(0.8)), (8, 30)),
        lambda o: T.SequentialLR(
            o,
            [
                T.ConstantLR(o, factor=0.1, total_iters=1000),
                T.StepLR(o, 4),
                T.ExponentialLR(o, 0.8),
            ],
            milestones=[8, 30],
        ),
    ),
}


def torch_lrs(make: Callable, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    with warnings.catch_warnings():
        # SequentialLR passes an argument that torch itself calls deprecated.
        warnings.simplefilter("ignore", UserWarning)
        scheduler = make(optimizer)
        rates = []
        for step in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step + 1 < steps:
                scheduler.step()
    return rates


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_torchs_rate(name: str) -> None:
    schedule, make = CASES[name]
    ours = [schedule.lr(BASE, step) for step in range(1, STEPS + 1)]
    assert ours == pytest.approx(torch_lrs(make, STEPS), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_json_and_back(name: str) -> None:
    schedule, _ = CASES[name]
    again = S.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert [again(t) for t in range(1, 30)] == [schedule(t) for t in range(1, 30)]


def test_after_the_end_the_rate_stays() -> None:
    for schedule in (S.Cosine(10, eta_min=0.1), S.Linear(10), S.Polynomial(10), S.OneCycle(10)):
        assert schedule.lr(BASE, 1000) == pytest.approx(schedule.lr(BASE, 11))


def test_a_step_is_counted_from_one() -> None:
    with pytest.raises(PrepareError, match="steps count from 1: 0"):
        S.Constant().lr(BASE, 0)


METRICS = [1.0, 0.9, 0.9, 0.9, 0.9, 0.89, 0.5, 0.6, 0.6, math.nan, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patience": 1},
        {"patience": 1, "cooldown": 2, "factor": 0.5},
        {"patience": 0, "threshold_mode": "abs", "threshold": 0.05},
        {"patience": 1, "mode": "max"},
        {"patience": 0, "min_lr": 0.05, "factor": 0.4},
        {"patience": 0, "factor": 0.1, "eps": 1e-3},
    ],
    ids=str,
)
def test_reduce_on_plateau_follows_torch(options: dict) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    theirs = T.ReduceLROnPlateau(optimizer, **options)
    ours = S.ReduceOnPlateau(**options)
    for metric in METRICS:
        theirs.step(metric)
        ours.update(metric)
        assert ours.lr(BASE, 1) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_plateau_state_survives_json() -> None:
    first = S.Warmup(3, S.ReduceOnPlateau(patience=1))
    for metric in METRICS[:6]:
        first.update(metric)
    again = S.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again.lr(BASE, 50) == BASE  # settings only
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for metric in METRICS[6:]:
        first.update(metric)
        again.update(metric)
        assert again.lr(BASE, 50) == first.lr(BASE, 50)
    assert first.lr(BASE, 50) < BASE


def test_chain_keeps_the_state_of_its_parts() -> None:
    first = S.Chain((S.Constant(), S.ReduceOnPlateau(patience=0)), (2,))
    first.update(1.0)
    first.update(1.0)
    again = S.Chain((S.Constant(), S.ReduceOnPlateau(patience=0)), (2,))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.lr(BASE, 9) == first.lr(BASE, 9) == pytest.approx(BASE * 0.1)


def test_state_of_another_schedule_is_refused() -> None:
    with pytest.raises(PrepareError, match="cosine has no state, but got best"):
        S.Cosine(3).load_state_dict({"best": 1.0})
    with pytest.raises(PrepareError, match="reduce_on_plateau: expected a state with best, bad"):
        S.ReduceOnPlateau().load_state_dict({})


def transformers_cosine(t: int, warmup: int, total: int) -> float:
    if t < warmup:
        return t / warmup
    return 0.5 * (1 + math.cos(math.pi * (t - warmup) / (total - warmup)))


def test_names_with_warmup() -> None:
    for schedule in (
        S.resolve_schedule("cosine", total=50, warmup=10),
        S.resolve_schedule("cosine:warmup=10,total=50"),
        S.resolve_schedule("cosine:warmup=0.2", total=50),
        S.resolve_schedule(
            {"name": "warmup", "steps": 10, "after": {"name": "cosine", "total": 40}}
        ),
    ):
        assert schedule == S.Warmup(10, S.Cosine(40))
        expected = [transformers_cosine(t, 10, 50) for t in range(50)]
        assert [schedule(t + 1) for t in range(50)] == pytest.approx(expected)


def test_names() -> None:
    assert S.resolve_schedule(None, total=9) == S.Constant()
    assert S.resolve_schedule("one-cycle", total=9, pct_start=0.5) == S.OneCycle(9, pct_start=0.5)
    assert S.resolve_schedule("step:step_size=3", gamma=0.5) == S.Step(3, gamma=0.5)
    assert S.resolve_schedule("multi_step:milestones=[3,5]") == S.MultiStep((3, 5))
    mine = S.Linear(4)
    assert S.resolve_schedule(mine, total=9) is mine


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("cosin", {}, "unknown schedule: 'cosin'\nhint: did you mean cosine"),
        ("cosine", {}, "cosine needs total\nhint: write cosine:total=..."),
        ("cosine", {"total": 5, "warmup": 5}, r"warmup \(5 steps\) must be shorter"),
        ("cosine:warmup=0.5", {}, "warmup=0.5 is a fraction and needs total="),
        ("cosine:warmup=2.5,total=9", {}, "warmup must be a whole number of steps: 2.5"),
        ("step:size=3", {}, "step has no option 'size'\nhint: it has step_size, gamma"),
        ("step:3", {}, "not an option: '3' in 'step:3'"),
        ("linear:total=0", {}, "linear needs total above 0: 0"),
        ("multi_step:milestones=[5,3]", {}, r"milestones must be in increasing order: \[5, 3\]"),
        ("one_cycle:total=5,anneal_strategy=up", {}, "one_cycle: unknown anneal_strategy: 'up'"),
        ("reduce_on_plateau:mode=low", {}, "mode must be 'min' or 'max': 'low'"),
        ("chain", {}, "unknown schedule: 'chain'"),
    ],
)
def test_refusals(text: str, options: dict, message: str) -> None:
    with pytest.raises(PrepareError, match=message):
        S.resolve_schedule(text, **options)


def test_a_chain_needs_a_milestone_between_two() -> None:
    with pytest.raises(PrepareError, match="2 schedules need 1 milestones, got 0"):
        S.Chain((S.Constant(), S.Constant()), ())
