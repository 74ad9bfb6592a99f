"""Cases for Dropout without a random mask; tests/autodiff/test_dropout.py has those with one."""

from __future__ import annotations

import numpy as np

from tests.cases.base import OpCase, bools, const, f, fixed

CASES = [
    OpCase("Dropout", (f(3, 4),), torch=lambda x: x),
    OpCase(
        "Dropout",
        (f(3, 4), const(0.7), const(np.array(False))),
        torch=lambda x, r, t: x,
        id="constant-mode-off",
    ),
    OpCase(
        "Dropout",
        (f(3, 4), fixed(np.array(0.7)), bools(False)),
        torch=lambda x, r, t: x,
        id="mode-off-at-run-time",
    ),
    OpCase(
        "Dropout",
        (f(3, 4), const(0.0), const(np.array(True))),
        torch=lambda x, r, t: x,
        id="keep-all",
    ),
    OpCase(
        "Dropout",
        (f(5, 4), fixed(np.array(0.0)), bools(True)),
        torch=lambda x, r, t: x,
        id="keep-all-at-run-time",
    ),
]
