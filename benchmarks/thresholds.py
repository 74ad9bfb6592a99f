"""Where the forms that ``onnxtrain.thresholds`` chooses between cross, on this machine.

    python -m benchmarks.thresholds                          # prints the table
    python -m benchmarks.thresholds REPEATED_POSITIONS       # of one threshold
    python -m benchmarks.thresholds --write                  # docs/speed.md

For each threshold a small net is built twice, with the form always and never used, at about half,
at, and about twice the size. The two steps run in turns on stock onnxruntime with one thread. Times
are processor time; the ratio is the median over the rounds, each of which has both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import onnxtrain
from benchmarks import machine, page, quiet, report, verdicts
from benchmarks.peers import ROOT
from benchmarks.threshold_nets import CASES, NOT_MEASURED, Case, Net
from onnxtrain import thresholds as T

PAGE = ROOT / "docs" / "speed.md"
ROUNDS, SLICE = 9, 0.1  # a round runs each form for about that many seconds
NOISE = 0.05  # ratios that near to 1 say nothing
_HUGE = 1 << 60


@dataclasses.dataclass(frozen=True)
class Point:
    """Seconds per step at a size, by round: with the form, and without it."""

    size: float
    used: list[float]
    unused: list[float]

    @property
    def ratio(self) -> verdicts.Spread:
        """The time with the form over the time without it."""
        return verdicts.ratio(self.used, self.unused)


@contextlib.contextmanager
def forced(name: str, value: float) -> Iterator[None]:
    """Set a threshold for a while."""
    old = getattr(T, name)
    setattr(T, name, value)
    try:
        yield
    finally:
        setattr(T, name, old)


def trainers(name: str, case: Case, net: Net) -> tuple[Any, Any]:
    """Return trainers of the net with the form always and never used.

    Raises:
        ValueError: if the net does not meet the choice.
    """
    always, never = (0, _HUGE) if case.side == "from" else (_HUGE, 0)
    built = []
    for value in (always, never):
        with forced(name, value):
            optimizer = onnxtrain.optim.SGD(lr=1e-6)
            built.append(onnxtrain.build(net.model, loss=net.loss, optimizer=optimizer))
    models = [a.models["step"].SerializeToString(deterministic=True) for a in built]
    if models[0] == models[1]:
        raise ValueError(f"{name}: the net has the same step whatever the threshold")
    first, second = (onnxtrain.Trainer(a, threads=1, layout="fused") for a in built)
    return first, second


def measure(name: str, size: float, *, rounds: int = ROUNDS, seconds: float = SLICE) -> Point:
    """Return the times at one of the sizes of a threshold's case."""
    case = CASES[name]
    net = case.nets[size]()
    runners = trainers(name, case, net)
    steps = []
    for trainer in runners:
        trainer.step(*net.batch)  # the first one is no measure
        steps.append(max(int(seconds / _time(trainer, net, 2)), 1))
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for side in (0, 1) if i % 2 else (1, 0):
            times[side].append(_time(runners[side], net, steps[side]))
    return Point(size, *times)


def _time(trainer: Any, net: Net, steps: int) -> float:
    """Return processor seconds per step."""
    start = time.process_time()
    for _ in range(steps):
        trainer.step(*net.batch)
    return max((time.process_time() - start) / steps, 1e-9)


def verdict(side: str, value: float, points: Sequence[Point]) -> str:
    """Return whether the ratio crosses 1 at the threshold, as far as noise lets one see.

    "yes": the form pays where it is used, and costs where it is not. "within noise": one of the two
    cannot be seen, and nothing contradicts. "no difference": neither can.
    """
    using = {"from": lambda s: s >= value, "up to": lambda s: s <= value}
    uses = using.get(side, lambda s: s < value)
    pays = [p for p in points if p.ratio.median < 1 - NOISE]
    costs = [p for p in points if p.ratio.median > 1 + NOISE]
    said = [f"costs at {_number(p.size)}" for p in costs if uses(p.size)]
    said += [f"would pay at {_number(p.size)}" for p in pays if not uses(p.size)]
    if said:
        return "**no**: " + ", ".join(said)
    if pays and costs:
        return "yes"
    return "within noise" if pays or costs else "no difference"


def table(results: dict[str, list[Point]]) -> str:
    """Return one row per threshold and size; the rows in which the form is used have a mark."""
    rows = []
    for name, points in results.items():
        case, value = CASES[name], getattr(T, name)
        for i, p in enumerate(points):
            ratio = f"{p.ratio.median:.2f} ({p.ratio.low:.2f}-{p.ratio.high:.2f})"
            times = [_milliseconds(p.used), _milliseconds(p.unused)]
            head = (
                [f"`{name}`", f"{case.side} {_number(value)} {case.counts}"] if i == 0 else ["", ""]
            )
            said = verdict(case.side, value, points) if i == 0 else ""
            rows.append([*head, said, _number(p.size), *times, ratio])
    columns = ["threshold", "its form is used", "crosses 1 there", "size"]
    return report.markdown([*columns, "with it, ms", "without, ms", "ratio"], rows, left=3)


def _milliseconds(times: Sequence[float]) -> str:
    return f"{1000 * verdicts.Spread.of(times).median:.2f}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def text(results: dict[str, list[Point]], facts: dict[str, Any]) -> str:
    """Return the section in Markdown."""
    missing = "; ".join(f"`{name}`: {why}" for name, why in NOT_MEASURED.items())
    parts = [
        (
            f"{facts['date']}, commit {facts['commit']}: "
            "`python -m benchmarks.thresholds --write`, one thread on "
            f"{facts['cores']} cores of {facts['cpu']}, onnxruntime "
            f"{facts['versions']['onnxruntime']}. Processor time of a whole step, both forms in "
            "turns within each round; the ratio is the median of the rounds, with the smallest and "
            f"the largest. Ratios within {NOISE:.0%} of 1 are taken for noise; a form that is a "
            "small part of its step may make no difference that can be seen."
        ),
        *page.busy(facts),
        table(results),
        f"Not measured here: {missing}.",
    ]
    return "\n\n".join(parts)


def run(names: Sequence[str], rounds: int = ROUNDS, *, write: bool = False) -> None:
    """Measure thresholds at sizes around each, and print the table or write it into the page."""
    facts = machine.facts()
    facts["others"] = quiet.begin(strict=write)
    results: dict[str, list[Point]] = {}
    for name in names:
        results[name] = [measure(name, s, rounds=rounds) for s in CASES[name].nets]
        ratios = ", ".join(f"{_number(p.size)}: {p.ratio.median:.2f}" for p in results[name])
        said = verdict(CASES[name].side, getattr(T, name), results[name])
        print(f"{name} = {getattr(T, name)}: {ratios}; {said}", flush=True)
        facts["others"].append(quiet.others())
    section = text(results, facts)
    print(section)
    if write:
        quiet.refuse_busy(facts)
        page.write(section, "thresholds", PAGE)
