"""The list of cases that have a stable difference and yet do not pass; it may only shrink."""

import json
from collections.abc import Iterable
from pathlib import Path

from tests.node_cases.check import FAILED, PASSED, SKIPPED, Verdict

PATH = Path(__file__).with_name("exceptions.json")


def load_exceptions() -> dict[str, str]:
    """Case name -> why it does not pass."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def save_exceptions(verdicts: Iterable[Verdict]) -> None:
    """Rewrite the list; existing reasons stay."""
    known = load_exceptions() if PATH.exists() else {}
    listed = {
        v.name: known.get(v.name, f"{v.outcome}: {v.reason}")
        for v in verdicts
        if v.outcome not in (PASSED, SKIPPED)
    }
    PATH.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def compare(verdicts: Iterable[Verdict], exceptions: dict[str, str]) -> list[str]:
    """What contradicts the list: a case outside it that does not pass, or one in it that does."""
    problems = []
    for v in verdicts:
        if v.outcome == FAILED:
            problems.append(f"{v.name} is wrong: {v.reason}")
        elif v.outcome not in (PASSED, SKIPPED) and v.name not in exceptions:
            problems.append(f"{v.name} does not pass: {v.outcome}: {v.reason}")
        elif v.outcome in (PASSED, SKIPPED) and v.name in exceptions:
            problems.append(f"{v.name} is {v.outcome}: take it off the exception list")
    return problems
