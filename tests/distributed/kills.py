"""Kill workers at random points: ``python -m tests.distributed.kills [RUNS] [SEED]``.

Every run must end on all workers within ten seconds, name the killed one, and continue to the
weights of a run that nobody has killed, to the bit.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import nets
from .pool import Pool

TASK = "tests.distributed.nets.resumable"
LIMIT = 10.0


def main(runs: int, seed: int) -> int:
    """Return the number of failures."""
    draw, failures, longest, before_start = random.Random(seed), 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nets.artifacts("mlp").save(folder / "art")
        pool = Pool(2)
        whole = pool.run(2, TASK, name, str(folder / "whole"), 0.0)[0]
        pool.close()
        for run in range(runs):
            out, victim = str(folder / f"run{run}"), draw.randrange(2)
            pool = Pool(2)
            pool.start(2, TASK, name, out, 0.02)
            time.sleep(draw.uniform(0.0, 2.5))
            os.kill(pool.processes[victim].pid, signal.SIGKILL)
            start = time.monotonic()
            survivor = _result(pool, 1 - victim)
            seconds = time.monotonic() - start
            pool.close()
            finished = isinstance(survivor, dict)
            text = str(survivor)
            early = "before the group" in text or "waited 8 s" in text
            before_start += early
            named = finished or early or f"lost worker {victim}" in text
            longest = max(longest, seconds)
            pool = Pool(2)
            again = pool.run(2, TASK, name, out, 0.0)[0]
            pool.close()
            same = isinstance(again, dict) and all(
                np.array_equal(again[n], whole[n]) for n in whole
            )
            good = same and named and seconds < LIMIT
            failures += not good
            print(
                f"run {run}: worker {victim} killed, the other ended after {seconds:.1f} s, "
                f"{'had finished' if finished else 'named it' if named else repr(survivor)}, "
                f"{'same bits' if same else f'DIFFERENT: {again!r}'}",
                flush=True,
            )
    print(
        f"{runs} runs, {failures} failures, longest end {longest:.1f} s, "
        f"{before_start} before the group had formed"
    )
    return failures


def _result(pool: Pool, rank: int) -> Any:
    try:
        return pool.result(rank, 2 * LIMIT)
    except TimeoutError as error:
        return error


if __name__ == "__main__":
    sys.exit(main(*(int(a) for a in (*sys.argv[1:], "50", "0")[:2])) > 0)
