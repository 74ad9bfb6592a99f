"""``python -m tests.hostile --cases N --seed S``: N damaged files, and what became of them."""

from __future__ import annotations

import argparse
import sys
import time

from tests.hostile.run import Tally, run

_SLICE = 500  # cases of one process


def main() -> int:
    """Print the counts and the bad ones; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    given = parser.parse_args()
    start, whole, end = time.monotonic(), Tally(), given.seed + given.cases
    for first in range(given.seed, end, _SLICE):
        part = run(range(first, min(first + _SLICE, end)))
        whole.join(part)
        print(
            f"{sum(whole.counts.values())} cases, {len(whole.bad)} bad",
            *part.bad,
            sep="\n",
            flush=True,
        )
    print(whole.report(), f"{time.monotonic() - start:.0f} s", sep="\n")
    return 1 if whole.bad else 0


if __name__ == "__main__":
    sys.exit(main())
