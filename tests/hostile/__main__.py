"""Run N mutated files and print the outcomes: ``python -m tests.hostile --cases N --seed S``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.hostile.run import Tally, run

_SLICE = 500  # cases per worker process


def main() -> int:
    """Print the counts and the failures; return 1 if there are failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    args = parser.parse_args()
    start, total, end = time.monotonic(), Tally(), args.seed + args.cases
    for first in range(args.seed, end, _SLICE):
        part = run(range(first, min(first + _SLICE, end)))
        total.join(part)
        print(
            f"{sum(total.counts.values())} cases, {len(total.bad)} bad",
            *part.bad,
            sep="\n",
            flush=True,
        )
    print(total.report(), f"{time.monotonic() - start:.0f} s", sep="\n")
    return 1 if total.bad else 0


if __name__ == "__main__":
    sys.exit(main())
