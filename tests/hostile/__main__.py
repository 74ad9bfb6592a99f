"""Run N hostile cases and print the outcomes: ``python -m tests.hostile --cases N --seed S``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.hostile.run import KINDS, Tally, mixed_cases, run

_SLICE = 500  # cases per worker process


def main() -> int:
    """Print the counts and the failures; return 1 if there are failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case of a kind")
    parser.add_argument("--kind", choices=KINDS, help="one kind of case; default: all")
    args = parser.parse_args()
    if args.kind:
        cases = [f"{args.kind}:{seed}" for seed in range(args.seed, args.seed + args.cases)]
    else:
        cases = list(mixed_cases(args.cases, args.seed))
    start, total = time.monotonic(), Tally()
    for first in range(0, len(cases), _SLICE):
        part = run(cases[first : first + _SLICE])
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
