"""Run cases in a worker process, which may hang or abort.

A case is a kind and a seed, ``data:17``. The module of a kind has ``steps_of_case(seed, traps)``,
which returns a name and the steps: pairs of a name and a function. A function may return, or raise
an :class:`OnnxTrainError`; everything else is a failure. :class:`WrongError` is for wrong results.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.flower import environment

Step = tuple[str, Callable[[], object]]
COMPARE = "compare"
"""The step that compares results: its time is spent in onnxruntime."""


class WrongError(AssertionError):
    """An entry point accepted a case and returned a wrong result."""


@dataclass(frozen=True)
class Kind:
    """A kind of case: the module that makes it, and its share of a long run."""

    module: str
    share: int
    flower: bool = False
    """Run in the environment of ``tests/flower``."""


KINDS = {
    "model": Kind("tests.hostile.entry_points", 35),
    "data": Kind("tests.hostile.data_cases", 25),
    "folder": Kind("tests.hostile.folder_cases", 15),
    "adapter": Kind("tests.hostile.adapter_cases", 15),
    "reply": Kind("tests.hostile.reply_cases", 10, flower=True),
}


def mixed_cases(count: int, seed: int) -> Iterator[str]:
    """Yield cases of all kinds by their shares; those of a kind follow each other."""
    total = sum(kind.share for kind in KINDS.values())
    for name, kind in KINDS.items():
        for number in range(round(count * kind.share / total)):
            yield f"{name}:{seed + number}"


WORDS = {
    "accepted": "accepted, correct result",
    "refused": "named error",
    "hang": "hangs",
    "abort": "aborts",
    "raw": "raw exceptions",
    "outside": "files touched outside",
    "different": "differences from onnxruntime",
    "slow": "over a second",
    "large": "over 500 MB",
}
GOOD = frozenset({"accepted", "refused"})
_PATIENCE = 300.0  # seconds until a case counts as a hang; the worker measures CPU time
_START = 600.0


@dataclass
class Tally:
    """Counts of outcomes, and descriptions of the failures."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, case: str, word: str, detail: str) -> None:
        """Count one case."""
        self.counts[word] += 1
        if word not in GOOD:
            self.bad.append(f"{case}: {word}: {detail}")

    def join(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.counts.update(other.counts)
        self.bad.extend(other.bad)

    def report(self) -> str:
        """Return all counts and the failures, one per line."""
        lines = [f"{title:<34}{self.counts[word]:>7}" for word, title in WORDS.items()]
        return "\n".join([*lines, *self.bad])


def run(cases: Iterable[str]) -> Tally:
    """Run cases; return the tally."""
    tally = Tally()
    worker: _Worker | None = None
    for case in cases:
        flower = KINDS[case.partition(":")[0]].flower
        if worker is not None and worker.flower != flower:
            worker.stop()
            worker = None
        worker = worker or _Worker(flower=flower)
        word, detail = worker.ask(case)
        tally.add(case, word, detail)
        if word in ("abort", "hang"):
            worker = None
    if worker is not None:
        worker.stop()
    return tally


class _Worker:
    def __init__(self, *, flower: bool) -> None:
        self.flower = flower
        interpreter = environment.python() if flower else sys.executable
        variables = environment.variables(Path(interpreter)) if flower else None
        self._process = subprocess.Popen(
            [interpreter, "-m", "tests.hostile.worker"],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._patience = _START

    def ask(self, case: str) -> tuple[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        ready = self._selector.select(self._patience)
        self._patience = _PATIENCE
        line = self._process.stdout.readline() if ready else None
        if line:
            word, detail = json.loads(line)
            return word, detail
        self.stop()
        return ("hang", "") if line is None else ("abort", f"exit {self._process.returncode}")

    def stop(self) -> None:
        self._selector.close()
        self._process.kill()
        self._process.communicate()
