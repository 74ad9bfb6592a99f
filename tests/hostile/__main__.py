"""``python -m tests.hostile N --seed S``: N mutants, and what became of them."""

from __future__ import annotations

import argparse
import sys

from tests.hostile.run import run


def main() -> int:
    """Print the counts and the bad ones; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first mutant")
    given = parser.parse_args()
    tally = run(range(given.seed, given.seed + given.number))
    print(", ".join(f"{word}: {n}" for word, n in sorted(tally.counts.items())))
    print("\n".join(tally.bad))
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
