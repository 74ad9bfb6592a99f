"""Where the variants that `onnxtrain.thresholds` chooses between cross, on this machine.

`python -m benchmarks.passes --sizes` runs this module. For each threshold a small net is built
twice, with the variant always and never used, at about half, at, and about twice the size. The two
steps run in turns on stock onnxruntime with one thread. Times are processor time; the ratio is the
median over the rounds.
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
from benchmarks.threshold_nets import CASES, Case, Net
from onnxtrain import thresholds as T

PAGE = ROOT / "docs" / "speed.md"
ROUNDS, SLICE = 9, 0.1  # seconds that each side runs in a round
NOISE = 0.05  # ratios this close to 1 show no difference
_HUGE = 1 << 60


@dataclasses.dataclass(frozen=True)
class Point:
    """Seconds per step at a size, by round: with the variant, and without it."""

    size: float
    used: list[float]
    unused: list[float]

    @property
    def ratio(self) -> verdicts.Spread:
        """The time with the variant over the time without it."""
        return verdicts.ratio(self.used, self.unused)


@contextlib.contextmanager
def forced(name: str, value: float) -> Iterator[None]:
    """Set a threshold inside a context."""
    old = getattr(T, name)
    setattr(T, name, value)
    try:
        yield
    finally:
        setattr(T, name, old)


def trainers(name: str, case: Case, net: Net) -> tuple[Any, Any]:
    """Return trainers of the net with the variant always and never used.

    Raises:
        ValueError: if both builds have the same step.
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
        trainer.step(*net.batch)  # warm-up
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
    """Return whether the ratio crosses 1 at the threshold.

    "yes": the variant is faster where it is used, and slower where it is not. "within noise": one
    of the two is below the noise, and nothing contradicts. "no difference": both are.
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
    """Return the results in Markdown, one row per threshold and size."""
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
    columns = ["threshold", "its variant is used", "crosses 1 there", "size"]
    return report.markdown([*columns, "with it, ms", "without, ms", "ratio"], rows, left=3)


def _milliseconds(times: Sequence[float]) -> str:
    return f"{1000 * verdicts.Spread.of(times).median:.2f}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def text(results: dict[str, list[Point]], facts: dict[str, Any]) -> str:
    """Return the section in Markdown."""
    parts = [
        (
            f"{facts['date']}, commit {facts['commit']}: "
            "`python -m benchmarks.passes --sizes --write`, one thread on "
            f"{facts['cores']} cores of {facts['cpu']}, onnxruntime "
            f"{facts['versions']['onnxruntime']}. Processor time of a whole step, both variants in "
            "turns within each round; the ratio is the median of the rounds, with the smallest and "
            f"the largest. Ratios within {NOISE:.0%} of 1 count as noise; a variant that is a "
            "small part of its step may make no measurable difference."
        ),
        *page.busy(facts),
        table(results),
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
