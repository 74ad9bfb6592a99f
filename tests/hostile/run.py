"""Run cases in a worker process, which may hang or abort."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

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

    def add(self, seed: int, word: str, detail: str) -> None:
        """Count one case."""
        self.counts[word] += 1
        if word not in GOOD:
            self.bad.append(f"seed {seed}: {word}: {detail}")

    def join(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.counts.update(other.counts)
        self.bad.extend(other.bad)

    def report(self) -> str:
        """Return all counts and the failures, one per line."""
        lines = [f"{title:<34}{self.counts[word]:>7}" for word, title in WORDS.items()]
        return "\n".join([*lines, *self.bad])


def run(seeds: Iterable[int]) -> Tally:
    """Run the cases of the given seeds; return the tally."""
    tally = Tally()
    worker: _Worker | None = None
    for seed in seeds:
        worker = worker or _Worker()
        word, detail = worker.ask(seed)
        tally.add(seed, word, detail)
        if word in ("abort", "hang"):
            worker = None
    if worker is not None:
        worker.stop()
    return tally


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._patience = _START

    def ask(self, seed: int) -> tuple[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
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
