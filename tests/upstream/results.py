"""Outcomes of programs and tests of other projects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class Result:
    """One program or test of another project, and how it ended."""

    project: str
    program: str
    outcome: Outcome
    reason: str = ""
